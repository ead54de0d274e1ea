"""One kernel as data: what it computes, how much it moves, and on whose account."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Phase = Literal["forward", "backward"]
ALLOCATION = 512  # the CUDA allocator gives memory in pieces of this many bytes
FREE = frozenset({"_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "alias", "empty", "empty_like"})


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel that runs in a training step.

    `block` is the name of the block it belongs to, or '' for stem, head and loss. `synthesis` marks what depends
    on no input: the making of an operator's weights.
    """

    name: str
    block: str
    phase: Phase
    synthesis: bool
    flops: int
    bytes_moved: int
    outputs: int  # numbers written
    dtype: torch.dtype


def allocated(num_bytes: int) -> int:
    """What the CUDA allocator takes for a tensor of this size."""
    return -(-num_bytes // ALLOCATION) * ALLOCATION


def tensors_in(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def runs_no_kernel(func: Any) -> bool:
    """Views and empty tensors cost nothing on the device."""
    schema = func._schema
    views = not schema.is_mutable and any(made.alias_info is not None for made in schema.returns)
    return views or func._overloadpacket.__name__ in FREE


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> int:
    """By torch's own formulas: two for a multiply and add, none for elementwise work."""
    from torch.utils.flop_counter import flop_registry

    packet = func._overloadpacket
    in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
    formula = flop_registry.get(in_place.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=made))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that these tensors touch; an expanded one touches what it stores."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def computed_in(tensors: Iterable[Tensor]) -> torch.dtype:
    floating = (tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)
    return next(floating, torch.float32)
