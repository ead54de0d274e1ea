"""The layers that operators are built of: copies of a block's layers that get their weights at each call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from ...errors import ReplearnError
from .options import Options, ReadingOptions
from .ridge import Moments
from .shell import call_with, shell_of, without_hooks
from .synthesis import Source, as_computed, full_precision, per_row, upcast

if TYPE_CHECKING:
    from .site import Site

Activation = Callable[[Tensor], Tensor]


def fresh_norm(norm: Any, device: torch.device) -> nn.Module:
    """A new normalisation layer with the settings of the block's and initial values.

    A frozen BatchNorm, as detectors have in pretrained backbones, becomes a trainable one: the operator's
    statistics are not known yet.
    """
    if type(norm).__name__.startswith("FrozenBatchNorm"):
        fresh: nn.Module = nn.BatchNorm2d(int(norm.weight.numel()), eps=float(norm.eps))
        return fresh.to(device=device, dtype=norm.weight.dtype)
    fresh = without_hooks(copy.deepcopy(norm)).to(device)
    for layer in fresh.modules():
        if device.type != "meta" and callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    return fresh.requires_grad_(True)


def own_activation(activation: Activation) -> Activation:
    """The block's activation: a copy if it is a module, itself if it is a function."""
    if isinstance(activation, nn.Module):
        return without_hooks(copy.deepcopy(activation)).requires_grad_(True)
    return activation


class Convolution(nn.Module):
    """The removed block's convolution (stride, padding, dilation, groups) with a given kernel."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.shell = shell_of(layer, device=device)

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        kernel = as_computed(kernel, x)
        shell: Any = self.shell
        if type(shell).forward is nn.Conv2d.forward:  # without the cost of functional_call
            return shell._conv_forward(x, kernel, None)
        return call_with({"weight": kernel}, shell, (x,))

    def patches(self, x: Tensor) -> Tensor:
        """The input windows as rows, one per output pixel: (pixels, in * q * q)."""
        conv: Any = self.shell
        if type(conv) is not nn.Conv2d or conv.groups != 1 or conv.padding_mode != "zeros":
            raise ReplearnError(f"A fit needs an nn.Conv2d without groups that pads with zeros, not {conv}.")
        if conv.kernel_size == (1, 1) and conv.stride == (1, 1):
            return x.movedim(1, -1).reshape(-1, x.shape[1])
        padding = conv._reversed_padding_repeated_twice[::-2]  # in numbers, also where it says 'same'
        columns = unfold(x, conv.kernel_size, conv.dilation, tuple(padding), conv.stride)
        return columns.transpose(1, 2).reshape(-1, columns.shape[1])

    def plain(self, kernel: Tensor, dtype: torch.dtype, norm: nn.Module | None = None) -> nn.Module:
        """The convolution with this kernel, and the norm after it, folded into the kernel where possible."""
        if norm is None or isinstance(norm, nn.Identity):
            return shell_of(self.shell, fill={"weight": kernel.to(dtype)})
        if type(self.shell) is not nn.Conv2d or not foldable(norm):
            return nn.Sequential(self.plain(kernel, dtype), copy.deepcopy(norm))
        scale, shift = norm_as_affine(norm, kernel.dtype)
        folded = {"weight": kernel * scale.view(-1, 1, 1, 1), "bias": shift}
        return shell_of(self.shell, fill={name: tensor.to(dtype) for name, tensor in folded.items()})


@torch.no_grad()
def fit_norm(norm: Any, weight: Tensor, moments: Moments, scale: Tensor | None = None) -> None:
    """Set a BatchNorm after a map with this weight: its statistics, the gain `scale`, and the targets' mean."""
    if not foldable(norm) or norm.weight is None:
        raise ReplearnError(f"A fit needs a BatchNorm with running statistics after the convolution, not {norm}.")
    mean, variance = (each[0] for each in moments.output_statistics(weight[None]))
    gain = (variance + norm.eps).sqrt()
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    norm.weight.copy_(gain if scale is None else gain * scale)
    norm.bias.copy_(moments.mean_y[0])


def foldable(norm: nn.Module) -> bool:
    return isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None


def norm_as_affine(norm: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm in eval mode (eq:deploy_bn_folding)."""
    mean, variance = norm.running_mean.to(dtype), norm.running_var.to(dtype)
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.to(dtype)
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.to(dtype)


def plain_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Linear:
    """An nn.Linear that owns a copy of this weight and bias."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.to(dtype, copy=True))
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(dtype, copy=True))
    return linear


class BorrowedNorm(nn.Module):
    """A neighbour's normalisation layer, run with the neighbour's weights.

    It holds a copy of the layer without parameters and reads these at every call. So nothing appears twice in the
    state dict, and hooks on the neighbour do not fire here.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        super().__init__()
        layer = source.look_up()
        if not isinstance(layer, nn.Module):
            raise ReplearnError(f"Expected a normalisation layer at {'.'.join(source.path)}.")
        self._source = source
        self._names = tuple(name for name, _ in layer.named_parameters())
        self.shell = shell_of(layer, device=device)

    def forward(self, x: Tensor) -> Tensor:
        paths = {name: name.split(".") for name in self._names}
        read = {n: self._source.read(*p).to(self._source.dtype_with(x, *p)) for n, p in paths.items()}
        return call_with(read, self.shell, (x,))

    def num_deployed(self) -> int:
        return sum(self._source.read(*name.split(".")).numel() for name in self._names)

    def plain(self) -> nn.Module:
        read = {name: self._source.read(*name.split(".")).clone() for name in self._names}
        return shell_of(self.shell, fill=read)


class Correction(nn.Module):
    """D, a learned tensor added to a weight: of the weight's shape, or left @ right of a given rank."""

    delta: nn.Parameter
    left: nn.Parameter
    right: nn.Parameter

    def __init__(self, shape: tuple[int, ...], rank: int | None, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self._shape = rank, shape
        sizes = {"delta": shape}
        if rank is not None:
            sizes = {"left": (shape[0], rank), "right": (rank, math.prod(shape[1:]))}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, device=device, dtype=dtype)))

    def weight(self) -> Tensor:
        """D: a full one in its stored dtype, a low-rank product in float32 or float64."""
        if self.rank is None:
            return self.delta
        with full_precision(self.left.device):
            return (upcast(self.left) @ upcast(self.right)).view(self._shape)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set D to zero, ready to be trained."""
        nn.init.zeros_(next(self.parameters()))
        if self.rank is not None:
            nn.init.normal_(self.right, std=self.right.shape[1] ** -0.5)

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiply D by a number, or each row by its own."""
        first = next(self.parameters())
        first.mul_(per_row(factor, first) if isinstance(factor, Tensor) else factor)

    @torch.no_grad()
    def set(self, delta: Tensor, factors: tuple[Tensor, Tensor] | None = None) -> None:
        """Store a fitted D, or its factors if it has low rank."""
        if factors is None:
            self.delta.copy_(delta.view(self.delta.shape))
        else:
            self.left.copy_(factors[0][0])
            self.right.copy_(factors[1][0])


def correction_of(options: Options, shape: tuple[int, ...], site: Site, where: str) -> Correction | None:
    """The correction that the options ask for, or None; that of a vector or scalar is always full."""
    if not isinstance(options, ReadingOptions) or options.correction == "none":
        return None
    if options.correction == "full" or len(shape) < 2:
        return Correction(shape, None, site.device, site.dtype)
    largest = min(shape[0], math.prod(shape[1:]))
    if options.rank > largest:
        raise ReplearnError(
            f"{where}: a correction of rank {options.rank} does not fit a weight of shape {tuple(shape)}; "
            f"its rank is at most {largest}. Write rank={largest} or less, or correction='full'."
        )
    return Correction(shape, options.rank, site.device, site.dtype)
