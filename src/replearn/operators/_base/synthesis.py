"""The arithmetic of synthesis, as pure functions: read, normalise, scale, add.

norm(W)_c = W_c / sqrt(sum W_c^2 + eps)                      (eq:conv_norm, eq:linear_norm)
W_r       = a * norm(W_prev) + b * norm(W_next) + D          (eq:general_synthesis)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.anatomy import Part, resolve
from ...errors import ReplearnError
from .sharded import gathered, is_sharded, stored

EPS = 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A part of a neighbour, looked up anew at every read.

    The neighbour is held in plain data, not as a submodule: its keys stay where they are, and
    `deepcopy` and pickle of the model carry the reference over to the copy's own neighbour. A block that takes
    its place is read instead, unless it wraps the neighbour.
    """

    block: nn.Module
    path: tuple[str, ...]
    transposed: bool
    rows: tuple[int, int] | None
    stop_gradient: bool
    owner: nn.Module | None = None  # a module around both the operator and the neighbour, and the way from there
    way: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        block: nn.Module,
        part: Part,
        stop_gradient: bool,
        owner: nn.Module | None = None,
        way: tuple[str, ...] = (),
    ) -> Source:
        return cls(block, tuple(part.path.split(".")), part.transposed, part.rows, stop_gradient, owner, way)

    def look_up(self) -> nn.Module | Tensor:
        found: nn.Module | Tensor = self.neighbour()
        for name in self.path:
            found = getattr(found, name)
        return found

    def neighbour(self) -> nn.Module:
        """The block that stands where the neighbour stood."""
        found: Any = self.owner
        for name in self.way:
            found = found._modules[name]
        if found is self.block or not self.way or any(part is self.block for part in found.modules()):
            return self.block
        try:
            resolve(found, ".".join(self.path))
        except AttributeError:
            raise ReplearnError(
                f"{'.'.join(self.way)} is a {type(found).__name__} now, without the {'.'.join(self.path)} that an "
                "operator reads. Put a block of the old class there, or plan again on a fresh model."
            ) from None
        return found  # type: ignore[no-any-return]

    def weight(self) -> Tensor:
        """The weight as (out, in, ...), in the dtype that it is stored in."""
        found = self.look_up()
        # a path leads to a layer, or to a parameter itself
        tensor = self.read() if isinstance(found, Tensor) else self.read("weight")
        return self._cut(tensor.t() if self.transposed else tensor)

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
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


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
