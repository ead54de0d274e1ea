"""Normalise only what is used: norm(x)[:, 0] is norm(x[:, 0]), token by token, and a classifier looks at one."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .flat_graph import FlatGraph


def pick_first_(flat: FlatGraph) -> None:
    """Have a token picked before a LayerNorm whose other tokens nobody uses, in place. `note_values_` is first."""
    norms: list[Any] = list(flat.graph.find_nodes(op="call_function", target=torch.layer_norm))
    for node in norms:
        if len(node.users) == 1 and picks_a_token(picked := next(iter(node.users)), node):
            x = node.args[0]
            with flat.graph.inserting_before(node):
                early = flat.graph.call_function(operator.getitem, (x, picked.args[1]))
            early.meta["value"] = x.meta["value"][picked.args[1]]
            node.meta["value"] = picked.meta["value"]
            node.replace_input_with(x, early)
            picked.replace_all_uses_with(node)
            flat.graph.erase_node(picked)
    flat.graph.lint()
    flat.recompile()


def picks_a_token(picked: Any, norm: Any) -> bool:
    """Is this norm(x)[:, t], of a norm over the last dimension, which is then still whole?"""
    if picked.op != "call_function" or picked.target is not operator.getitem or picked.args[0] is not norm:
        return False
    index, shape = picked.args[1], norm.args[1]
    if not isinstance(shape, (tuple, list)):  # a shape that the model's code takes off a tensor
        return False
    one = isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and type(index[1]) is int
    # (batch, tokens, width): of (batch, width) it would take a number out of what is normalised
    return bool(one) and len(shape) == 1 and norm.meta.get("value") is not None and norm.meta["value"].dim() == 3
