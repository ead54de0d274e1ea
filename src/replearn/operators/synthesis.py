"""The arithmetic of synthesis, as pure functions: read, normalise, scale, add.

norm(W)_c = W_c / sqrt(sum W_c^2 + eps)                      (eq:conv_norm, eq:linear_norm)
W_r       = a * norm(W_prev) + b * norm(W_next) + D          (eq:general_synthesis)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..anatomy import Part, resolve

EPS = 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A part of a neighbour, looked up anew at every read.

    The neighbour is held in plain data, not as a submodule: its keys stay where they are, and
    `deepcopy` and pickle of the model carry the reference over to the copy's own neighbour.
    """

    block: nn.Module
    path: tuple[str, ...]
    transposed: bool
    rows: tuple[int, int] | None
    stop_gradient: bool

    @classmethod
    def of(cls, block: nn.Module, part: Part, stop_gradient: bool) -> Source:
        return cls(block, tuple(part.path.split(".")), part.transposed, part.rows, stop_gradient)

    def look_up(self) -> nn.Module | Tensor:
        found: nn.Module | Tensor = self.block
        for name in self.path:
            found = getattr(found, name)
        return found

    def weight(self) -> Tensor:
        """The weight as (out, in, ...), in float32 or better."""
        found = self.look_up()
        tensor = found if isinstance(found, Tensor) else resolve(found, "weight")
        tensor = wide(gathered(tensor, self.stop_gradient))
        return self._cut(tensor.t() if self.transposed else tensor)

    def bias(self) -> Tensor | None:
        found = self.look_up()
        tensor = None if isinstance(found, Tensor) else getattr(found, "bias", None)
        return None if tensor is None else self._cut(wide(gathered(tensor, self.stop_gradient)))

    def _cut(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def gathered(tensor: Tensor, stop_gradient: bool) -> Tensor:
    """A source as an ordinary tensor: under FSDP2 a neighbour is sharded, and its shards are gathered.

    The gradient goes back as the mean over the ranks, which is how FSDP2 reduces its own.
    """
    if stop_gradient:
        tensor = tensor.detach()
    if not hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


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


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)


def per_row(coefficient: Tensor, weight: Tensor) -> Tensor:
    """A coefficient per output channel, shaped to multiply the weight."""
    return coefficient.view(-1, *[1] * (weight.dim() - 1))


def per_head(coefficient: Tensor, weight: Tensor) -> Tensor:
    """A coefficient per head, spread over the head's columns."""
    width = weight.shape[1] // coefficient.shape[0]
    return coefficient.repeat_interleave(width).view(1, -1)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Synthesis stays out of autocast; only its result is cast."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def as_computed(weight: Tensor, x: Tensor) -> Tensor:
    """Cast a synthesized weight to the dtype that x is computed in; autocast does it itself."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return weight
    return weight.to(x.dtype)
