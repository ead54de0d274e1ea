"""Compute only what is used: a classifier looks at one token, and most layers compute a token from itself alone.

f(x)[:, t] is f(x[:, t]) for linear layers, norms over the last dimension, activations and sums. So all that comes
after the last attention of a transformer is computed for one token instead of all.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..graph_module import FlatGraph
from ..inlining import argument, writes_in_place

# Of these each number comes from the one in the same place.
ONE_BY_ONE = (F.gelu, F.silu, F.leaky_relu, F.hardswish, torch.relu, torch.tanh, torch.sigmoid)
TWO_BY_TWO = {
    "call_function": (operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul),
    "call_method": ("add", "sub", "mul"),
}


def pick_first_(flat: FlatGraph) -> None:
    """Have a token picked before the layers whose other tokens nobody uses, in place. `note_values_` is first."""
    for token in {token for node in flat.graph.nodes if (token := picked_token(node)) is not None}:
        pick_early_(flat.graph, token)
    flat.graph.lint()
    flat.recompile()


def picked_token(node: fx.Node) -> int | None:
    """t of x[:, t], if this is one that nobody writes to, of x that is (batch, tokens, width)."""
    if any(writes_in_place(user) for user in node.users):
        return None
    if node.op != "call_function" or node.target is not operator.getitem or not is_whole(node.args[0]):
        return None
    index = node.args[1]
    if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and type(index[1]) is int:
        return index[1]
    return None


def is_whole(x: Any) -> bool:
    """Is this a value of three dimensions, the second of which can be picked from?"""
    value = x.meta.get("value") if isinstance(x, fx.Node) else None
    return value is not None and value.dim() == 3


def pick_early_(graph: fx.Graph, token: int) -> None:
    """Compute for one token what is only ever seen through x[:, t]."""
    index = (slice(None), token)
    picks = [node for node in graph.nodes if picked_token(node) == token]
    seen = set(picks)
    for node in reversed(graph.nodes):
        if node.users and all(user in seen for user in node.users) and goes_by_token(node):
            seen.add(node)
    early: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node in seen and node not in picks]:
        for x in node.all_input_nodes:
            if is_whole(x) and x not in seen:
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


def goes_by_token(node: fx.Node) -> bool:
    """Is every token of this value computed from the same token of others, and from weights?"""
    if not is_whole(node) or writes_in_place(node):
        return False
    x = argument(node, 0, "input")
    if node.target is torch.layer_norm:  # over the last dimension; not by a shape that is taken off a tensor
        shape = node.args[1]
        return is_whole(x) and isinstance(shape, (tuple, list)) and len(shape) == 1
    if node.target is F.linear:
        bias = argument(node, 2, "bias")
        return is_whole(x) and (bias is None or meets(bias, node))
    if node.op == "call_function" and node.target in ONE_BY_ONE:
        return is_whole(x)
    if node.target in TWO_BY_TWO.get(node.op, ()):
        return all(meets(value, node) for value in (*node.args, *node.kwargs.values()))
    return False


def meets(value: Any, total: fx.Node) -> bool:
    """Is this term of a sum, or factor, a number, a row for all tokens, or one for each token?"""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float))
    term = value.meta.get("value")
    if term is None:
        return False
    return term.dim() < 2 or (is_whole(value) and term.shape[1] == total.meta["value"].shape[1])
