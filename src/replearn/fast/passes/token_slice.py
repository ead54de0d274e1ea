"""Token-slice pushdown: slice the class token before the layers that act on each token alone.

f(x)[:, t] is f(x[:, t]) for linear layers, norms over the last dimension, activations and sums. What comes after
the last attention of a transformer is computed for one token.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph
from ..inlining import argument, writes_in_place
from ._context import Context

AFTER = ()

POINTWISE = (F.gelu, F.silu, F.leaky_relu, F.hardswish, torch.relu, torch.tanh, torch.sigmoid)
BINARY = {
    "call_function": (operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul),
    "call_method": ("add", "sub", "mul"),
}


def apply_(flat: FlatGraph, context: Context) -> int:
    """Slice each token before the layers whose other tokens are not used; the number of layers."""
    tokens = {token for node in flat.graph.nodes if (token := sliced_token(node)) is not None}
    count = sum(push_down_(flat.graph, token) for token in tokens)
    flat.graph.lint()
    flat.recompile()
    return count


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""

    class FirstToken(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]  # type: ignore[no-untyped-call]

    return FirstToken(nn.LayerNorm(16), nn.Linear(16, 8)), torch.randn(3, 5, 16)


def sliced_token(node: fx.Node) -> int | None:
    """t of x[:, t], if x is (batch, tokens, width) and nothing writes to the slice."""
    if any(writes_in_place(user) for user in node.users):
        return None
    if node.op != "call_function" or node.target is not operator.getitem or not has_tokens(node.args[0]):
        return None
    index = node.args[1]
    if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and type(index[1]) is int:
        return index[1]
    return None


def has_tokens(x: Any) -> bool:
    """True for a value of three dimensions."""
    value = x.meta.get("value") if isinstance(x, fx.Node) else None
    return value is not None and value.dim() == 3


def push_down_(graph: fx.Graph, token: int) -> int:
    """Compute for one token what is only read through x[:, t]."""
    index = (slice(None), token)
    picks = [node for node in graph.nodes if sliced_token(node) == token]
    seen = set(picks)
    for node in reversed(graph.nodes):
        if node.users and all(user in seen for user in node.users) and acts_per_token(node):
            seen.add(node)
    early: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node in seen and node not in picks]:
        for x in node.all_input_nodes:
            if has_tokens(x) and x not in seen:
                if x not in early:
                    with graph.inserting_before(node):
                        early[x] = graph.call_function(operator.getitem, (x, index))
                    early[x].meta["value"] = x.meta["value"][index]
                node.replace_input_with(x, early[x])
    for node in seen.difference(picks):
        node.meta["value"] = node.meta["value"][index].contiguous()
    for pick in picks:
        if pick.args[0] in seen:
            pick.replace_all_uses_with(pick.args[0])
            graph.erase_node(pick)
    return len(seen) - len(picks)


def acts_per_token(node: fx.Node) -> bool:
    """True if each token is computed from the same token of the inputs, and from weights."""
    if not has_tokens(node) or writes_in_place(node):
        return False
    x = argument(node, 0, "input")
    if node.target is torch.layer_norm:  # over the last dimension, with a constant shape
        shape = node.args[1]
        return has_tokens(x) and isinstance(shape, (tuple, list)) and len(shape) == 1
    if node.target is F.linear:
        bias = argument(node, 2, "bias")
        return has_tokens(x) and (bias is None or broadcasts_over_tokens(bias, node))
    if node.op == "call_function" and node.target in POINTWISE:
        return has_tokens(x)
    if node.target in BINARY.get(node.op, ()):
        return all(broadcasts_over_tokens(value, node) for value in (*node.args, *node.kwargs.values()))
    return False


def broadcasts_over_tokens(value: Any, total: fx.Node) -> bool:
    """True for an operand that is a number, one row for all tokens, or one for each token."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float))
    term = value.meta.get("value")
    if term is None:
        return False
    return term.dim() < 2 or (has_tokens(value) and term.shape[1] == total.meta["value"].shape[1])
