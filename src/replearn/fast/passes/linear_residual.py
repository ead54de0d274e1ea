"""Residual sums of a transformer with the linear layers before them, under autocast.

Each half of a block ends in u + linear(h, W, b), with h in half precision and u in float32. They are fused in a
CUDA graph alone: in eager mode the launch of a Triton kernel takes what it saves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, is_sum
from ..inlining import argument, drop_unused_
from ..kernels.linear_residual import can_tile, linear_residual
from ._context import Context, has_triton
from ._nodes import written_between

AFTER = ("patch_embed",)


def apply_(flat: FlatGraph, context: Context) -> int:
    if context.dtype is None or not context.graph or context.compile or not has_triton(flat):
        return 0
    count = 0
    for node in [node for node in flat.graph.nodes if is_sum(node)]:
        for u, layer in (node.args, node.args[::-1]):
            if can_fuse(flat, u, layer, context.dtype) and not written_between(flat, layer, node):
                fuse_(flat, node, u, layer)
                count += 1
                break
    drop_unused_(flat)
    return count


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)  # type: ignore[no-untyped-call]

    return Residual(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(3, 5, 64)


def can_fuse(flat: FlatGraph, u: Any, layer: Any, dtype: torch.dtype) -> bool:
    """True for float32 u plus a linear layer in `dtype` that has no other reader."""
    if layer.target is not F.linear or len(layer.users) > 1:
        return False
    weight = held(flat, argument(layer, 1, "weight"))
    stream, h, made = (node.meta.get("value") for node in (u, argument(layer, 0, "input"), layer))
    if weight is None or not can_tile(*weight.shape) or stream is None or h is None or made is None:
        return False
    if not (stream.is_contiguous() and h.is_contiguous()):  # as of a sliced token
        return False
    return stream.shape == made.shape and (stream.dtype, h.dtype, made.dtype) == (torch.float32, dtype, dtype)


def fuse_(flat: FlatGraph, total: fx.Node, u: fx.Node, layer: fx.Node) -> None:
    h, weight, bias = (argument(layer, place, name) for place, name in enumerate(("input", "weight", "bias")))
    with flat.graph.inserting_before(total):
        read = flat.graph.get_attr(str(weight.target))  # other readers may want it in float32
        read.meta["cast"] = True  # the bias is added in float32
        made = flat.graph.call_function(linear_residual, (u, h, read, bias))
    made.meta["value"] = total.meta["value"]
    total.replace_all_uses_with(made)
    flat.graph.erase_node(total)
    flat.graph.erase_node(layer)
