"""The arithmetic of synthesis, as pure functions: read, normalise, scale, add.

norm(W)_c = W_c / sqrt(sum W_c^2 + eps)                      (eq:conv_norm, eq:linear_norm)
W_r       = a * norm(W_prev) + b * norm(W_next) + D          (eq:general_synthesis)
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.anatomy import Part, resolve
from ...errors import ReplearnError

EPS = 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A part of a neighbour, looked up anew at every read.

    The neighbour is held in plain data, not as a submodule: its keys stay where they are, and
    `deepcopy` and pickle of the model carry the reference over to the copy's own neighbour. A block that takes
    its place is read instead, unless it wraps the neighbour.
    """

    block: nn.Module
    part: Part
    stop_gradient: bool
    owner: nn.Module | None = None  # a module around both the operator and the neighbour, and the way from there
    way: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.part.path.split("."))

    def look_up(self) -> nn.Module | Tensor:
        return resolve(self.neighbour(), self.part.path)

    def neighbour(self) -> nn.Module:
        """The block that stands where the neighbour stood."""
        found: Any = self.owner
        for name in self.way:
            found = found._modules[name]
        if found is self.block or not self.way or any(part is self.block for part in found.modules()):
            return self.block
        try:
            resolve(found, self.part.path)
        except AttributeError:
            raise ReplearnError(
                f"{'.'.join(self.way)} is a {type(found).__name__} now, without the {self.part.path} that an "
                "operator reads. Put a block of the old class there, or plan again on a fresh model."
            ) from None
        return found

    def weight(self) -> Tensor:
        """The weight as (out, in, ...), in the dtype that it is stored in."""
        found = self.look_up()
        # a path leads to a layer, or to a parameter itself
        tensor = self.read() if isinstance(found, Tensor) else self.read("weight")
        return self._cut(tensor.t() if self.part.transposed else tensor)

    def bias(self) -> Tensor | None:
        found = self.look_up()
        if isinstance(found, Tensor) or getattr(found, "bias", None) is None:
            return None
        return self._cut(self.read("bias"))

    def read(self, *below: str) -> Tensor:
        """The parameter at a path below the source, whole, under stop-gradient if that is asked for."""
        return gathered(self._stored(below), self.stop_gradient)

    def anchors(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The registers in which the parts on the way to this source stand: name and entry of each."""
        found: Any = self.owner
        for name in self.way:
            yield found._modules, name, found._modules[name]
            found = found._modules[name]
        found = self.neighbour()
        for name in self.path:
            if isinstance(found, Tensor):
                return
            register = found._modules if name in found._modules else found._parameters
            yield register, name, register.get(name)
            found = register.get(name)
        if isinstance(found, nn.Module):
            yield from ((found._parameters, name, found._parameters.get(name)) for name in ("weight", "bias"))

    def dtype_with(self, x: Tensor, *below: str) -> torch.dtype:
        """The dtype in which the neighbour's own code would see this parameter next to x."""
        parameter = self._stored(below)
        narrower = x.dtype.is_floating_point and x.dtype.itemsize < parameter.dtype.itemsize
        # FSDP2's mixed precision casts a block's input and parameters alike, and shards are not cast yet
        return x.dtype if narrower and is_sharded(parameter) and not autocasting(x) else parameter.dtype

    def _stored(self, below: tuple[str, ...]) -> Tensor:
        *names, last = self.path + below
        modules = [self.neighbour()]
        for name in names:
            modules.append(getattr(modules[-1], name))
        found = stored(modules, last)
        if found is None:
            raise ReplearnError(f"A source has no parameter {'.'.join(self.path + below)} any more.")
        if not torch.compiler.is_compiling() and last in vars(modules[-1]):
            raise ReplearnError(
                f"{'.'.join((*self.way, *self.path, *below))}, which an operator reads, is no parameter any more: "
                "pruning or weight_norm computes it anew when its layer is called. Make it permanent first, as "
                "torch.nn.utils.prune.remove or remove_weight_norm do."
            )
        return found

    def _cut(self, tensor: Tensor) -> Tensor:
        return tensor if self.part.rows is None else tensor[slice(*self.part.rows)]


def wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 if it is that already."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def row_norms(weight: Tensor) -> Tensor:
    """sqrt(sum of squares + eps) of each output row, kept broadcastable."""
    # sum over dimensions, not over a flattened view: that would copy a channels_last kernel
    return weight.square().sum(dim=tuple(range(1, weight.dim())), keepdim=True).add(EPS).sqrt()


def unit_rows(weight: Tensor) -> Tensor:
    """norm(W): every output row divided by its length."""
    return weight / row_norms(weight)


def per_row(coefficient: Tensor, weight: Tensor) -> Tensor:
    """A coefficient per output channel, shaped to multiply the weight."""
    return coefficient.view(-1, *[1] * (weight.dim() - 1))


def per_head(coefficient: Tensor, weight: Tensor) -> Tensor:
    """A coefficient per head, spread over the head's columns."""
    width = weight.shape[1] // coefficient.shape[0]
    return coefficient.repeat_interleave(width).view(1, -1)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Synthesis stays out of autocast; only its result is cast."""
    # not torch.amp.is_autocast_available: torch 2.11 can't trace it
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def as_computed(weight: Tensor, x: Tensor) -> Tensor:
    """Cast a synthesized weight to the dtype that x is computed in; autocast does it itself."""
    return weight if autocasting(x) else weight.to(x.dtype)


def autocasting(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


# Neighbours that FSDP2 or tensor parallelism spreads over processes: shards are read, and gathered.


def stored(modules: Sequence[nn.Module], name: str) -> Tensor | None:
    """The parameter of the last of these nested modules, as the optimizer knows it.

    While a block is in use, FSDP2 puts whole tensors where its shards were, and frees their memory after. An
    operator can meet them (in gradient accumulation without resharding, say) and must not hold them: at its
    own backward pass they may be gone, and a gradient that comes after the block's own would be lost.
    """
    tensor: Tensor | None = getattr(modules[-1], name, None)
    if torch.compiler.is_compiling():  # a graph has no guards on FSDP2's state: it takes what is there
        return tensor
    for module in modules:
        if hasattr(type(module), "_get_fsdp_state"):  # on the class: a module is slow to say no
            for shard, gathered_ones in _shards(module):
                if any(tensor is other for other in gathered_ones):
                    return shard
    return tensor


def _shards(module: Any) -> Iterator[tuple[Tensor, tuple[Tensor | None, ...]]]:
    """Every shard of an FSDP2 module with the tensors that FSDP2 puts in its place at times."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group, 2.13 a list
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in () if group is None else group.fsdp_params:
            names = ("_unsharded_param", "_sharded_post_forward_param")
            yield parameter.sharded_param, tuple(getattr(parameter, name, None) for name in names)


def is_sharded(tensor: Tensor | None) -> bool:
    return hasattr(tensor, "device_mesh")


def gathered(tensor: Tensor, stop_gradient: bool) -> Tensor:
    """The whole of a parameter as an ordinary tensor.

    The gradient goes back as the mean over the processes, which is how FSDP2 reduces its own.
    """
    if stop_gradient:
        tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)
