"""LayerNorms that write the half precision which the linear layers behind them read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph
from ..inlining import argument
from ..kernels.layernorm_half import layernorm_half
from ._context import Context, has_triton

AFTER = ("linear_residual",)


def apply_(flat: FlatGraph, context: Context) -> int:
    """Replace each LayerNorm that only linear layers read, but for strided inputs, as of a token that was sliced.

    In a CUDA graph alone: in eager mode the launch of a Triton kernel takes what it saves.
    """
    if context.dtype is None or not context.graph or context.compile or not has_triton(flat):
        return 0
    count = 0
    for node in flat.graph.find_nodes(op="call_function", target=torch.layer_norm):
        value = node.meta.get("value")
        if value is None or value.dtype is not torch.float32:
            continue
        if node.args[0].meta["value"].is_contiguous() and all(reads_as_half(user, node) for user in node.users):
            node.target = layernorm_half
            count += 1
    flat.recompile()
    return count


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)), torch.randn(3, 5, 16)


def reads_as_half(user: fx.Node, node: fx.Node) -> bool:
    """True if this use casts the value, or reads its shape alone."""
    if user.target is getattr:
        return user.args[1] == "shape"
    layer = user.op == "call_function" and user.target is F.linear and argument(user, 0, "input") is node
    return layer and node not in (argument(user, 1, "weight"), argument(user, 2, "bias"))
