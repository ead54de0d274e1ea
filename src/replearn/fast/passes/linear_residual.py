"""Join the residual sums of a flat graph with the linear layers before them, where a kernel of ours computes both.

Under autocast a block's half ends in u + linear(h, W, b), h being in half precision and u in float32. torch makes
the product, stores it, and reads it again for the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..graph_module import FlatGraph, held, is_sum
from ..inlining import argument, drop_unused_, writes_in_place
from ..kernels.linear_residual import can_be_cut, residual_linear


def join_sums_(flat: FlatGraph, dtype: torch.dtype) -> None:
    """Put one operation in the place of each such sum and its layer, in place; elsewhere nothing changes.

    `note_values_` comes first; `dtype` is that of the autocast which the graph will run under.
    """
    for node in [node for node in flat.graph.nodes if is_sum(node)]:
        for u, layer in (node.args, node.args[::-1]):
            if fits(flat, u, layer, dtype) and not may_be_written(layer, node):
                write_(flat, node, u, layer)
                break
    drop_unused_(flat)


def fits(flat: FlatGraph, u: Any, layer: Any, dtype: torch.dtype) -> bool:
    """Is this u + linear(h, W, b), of a stream in float32 and a layer in half precision that nobody else sees?"""
    if layer.target is not F.linear or len(layer.users) > 1:
        return False
    weight = held(flat, argument(layer, 1, "weight"))
    stream, h, made = (node.meta.get("value") for node in (u, argument(layer, 0, "input"), layer))
    if weight is None or not can_be_cut(*weight.shape) or stream is None or h is None or made is None:
        return False
    if not (stream.is_contiguous() and h.is_contiguous()):  # as of a token that was picked
        return False
    return stream.shape == made.shape and (stream.dtype, h.dtype, made.dtype) == (torch.float32, dtype, dtype)


def may_be_written(layer: fx.Node, total: fx.Node) -> bool:
    """May anything between the two write to what the layer reads, which it will then read where the sum is?"""
    node = layer.next
    while node is not total and node.op != "call_module" and not writes_in_place(node):
        node = node.next
    return node is not total


def write_(flat: FlatGraph, total: fx.Node, u: fx.Node, layer: fx.Node) -> None:
    h, weight, bias = (argument(layer, place, name) for place, name in enumerate(("input", "weight", "bias")))
    with flat.graph.inserting_before(total):
        read = flat.graph.get_attr(str(weight.target))  # apart from others who read it, perhaps in float32
        read.meta["cast"] = True  # once, as autocast would at every call; the bias is added in float32
        made = flat.graph.call_function(residual_linear, (u, h, read, bias))
    made.meta["value"] = total.meta["value"]
    total.replace_all_uses_with(made)
    flat.graph.erase_node(total)
    flat.graph.erase_node(layer)
