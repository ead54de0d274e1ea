"""Predicates of fx nodes that several passes share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held
from ..inlining import argument, writes_in_place

RELUS = {"call_function": (torch.relu, torch.relu_), "call_method": ("relu", "relu_")}
Pair = tuple[int, int]


def is_relu(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in RELUS.get(node.op, ())


def is_conv2d(flat: FlatGraph, node: Any) -> bool:
    """True for a torch.conv2d with a floating point weight of the model."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not torch.conv2d:
        return False
    weight = held(flat, argument(node, 1, "weight"))
    return weight is not None and weight.is_floating_point()


def sizes_of(conv: fx.Node) -> tuple[Pair, ...] | None:
    """Stride, padding and dilation of a conv2d without groups; None with groups, and for padding as 'same'."""
    if argument(conv, 6, "groups") not in (None, 1):
        return None
    places = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    found = [as_pair(argument(conv, place, name), default) for place, name, default in places]
    pairs = [pair for pair in found if pair is not None]
    return tuple(pairs) if len(pairs) == len(places) else None


def writes(flat: FlatGraph, node: fx.Node) -> bool:
    """True if the node writes to its input."""
    if node.op == "call_module":
        return bool(getattr(flat.get_submodule(str(node.target)), "inplace", False))
    return writes_in_place(node)


def written_between(flat: FlatGraph, first: fx.Node, last: fx.Node) -> bool:
    """True if a node between the two may write to a tensor that `first` reads."""
    node = first.next
    while node is not last and not writes(flat, node):
        node = node.next
    return node is not last


def add_parameter(flat: FlatGraph, name: str, tensor: Tensor, *, cast: bool = False) -> fx.Node:
    """Store a tensor as a parameter, and read it where nodes are being inserted.

    `cast`: it may be stored in autocast's dtype, since autocast would cast it at every call.
    """
    while hasattr(flat, name):
        name += "_"
    trained = any(parameter.requires_grad for parameter in flat.parameters())
    flat.register_parameter(name, nn.Parameter(tensor.detach().clone().contiguous(), requires_grad=trained))
    node = flat.graph.get_attr(name)
    node.meta["value"], node.meta["cast"] = torch.empty_like(tensor, device="meta"), cast
    return node


def as_pair(size: Any, default: int | None = None) -> Pair | None:
    """A size in both directions; None for what only torch understands, as 'same'."""
    size = default if size is None else size
    if type(size) is int:
        return size, size
    if isinstance(size, (tuple, list)) and len(size) in (1, 2) and all(type(each) is int for each in size):
        return size[0], size[-1]
    return None
