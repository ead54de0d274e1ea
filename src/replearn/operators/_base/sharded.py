"""Neighbours that FSDP2 or tensor parallelism spreads over processes: read the shards, and gather them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


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
