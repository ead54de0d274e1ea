"""Join the convolutions of a flat graph with the sums and ReLUs after them, which cuDNN computes at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ..graph_module import FlatGraph, held, is_sum
from ..inlining import argument, drop_unused_
from ..kernels.conv_bias_add_relu import Pair, convolve_relu
from ..train.overlapped_wgrad import pair
from .channels_last import writes
from .maxpool_relu import is_convolution, is_relu
from .stem import kept


def join_relus_(flat: FlatGraph) -> None:
    """Put one operation in the place of each ReLU of a convolution, or of its sum with something else, in place.

    `note_values_` comes first. Left are convolutions with groups, what somebody else sees before its ReLU, what is
    written to in between, sums that spread something smaller or are in other numbers, and weights that something
    else than convolutions reads.
    """
    for node in list(flat.graph.nodes):
        if (conv := convolution_of(flat, node)) is not None:
            write_(flat, node, conv)
    drop_unused_(flat)


def can_be_joined(flat: FlatGraph) -> bool:
    """Is there anything for `join_relus_` to do?"""
    return any(convolution_of(flat, node) is not None for node in flat.graph.nodes)


def num_joined(model: nn.Module) -> int:
    """How many such operations a flat graph has."""
    found = (
        model.graph.find_nodes(op="call_function", target=convolve_relu) if isinstance(model, FlatGraph) else ()
    )
    return len(found)


class Convolution(NamedTuple):
    """A convolution that can be joined, and the sum that it is in."""

    node: fx.Node
    settings: tuple[Pair, ...]
    total: fx.Node | None
    other: fx.Node | None


def write_(flat: FlatGraph, relu: fx.Node, conv: Convolution) -> None:
    with flat.graph.inserting_before(relu):
        weight = flat.graph.get_attr(str(argument(conv.node, 1, "weight").target))
        bias = bias_of(flat, conv)
        weight.meta["cast"] = bias.meta["cast"] = True  # once, as autocast would at every call
        given = argument(conv.node, 0, "input"), weight, bias, conv.other, *conv.settings
        made = flat.graph.call_function(convolve_relu, given)
    made.meta["value"] = relu.meta.get("value")
    relu.replace_all_uses_with(made)
    for node in (relu, conv.total, conv.node):  # by hand: what writes in place counts as used
        if node is not None:
            flat.graph.erase_node(node)


def convolution_of(flat: FlatGraph, relu: fx.Node) -> Convolution | None:
    """The convolution whose ReLU, or whose sum's, this is, if it can be joined; of two in a sum the later one."""
    if not is_relu(relu):
        return None
    before: Any = argument(relu, 0, "input")
    if not is_sum(before):
        ways: list[tuple[Any, fx.Node | None, fx.Node | None]] = [(before, None, None)]
    else:
        one, two = before.args
        ways = sorted(((one, before, two), (two, before, one)), key=lambda way: way[0], reverse=True)
    for conv, total, other in ways:
        settings = settings_of(flat, conv)
        if settings is None or (total is not None and len(total.users) > 1) or is_written(flat, conv, relu):
            continue
        if len(conv.users) == 1 and (other is None or (other is not conv and look_of(other) == look_of(conv))):
            return Convolution(conv, settings, total, other)
    return None


def look_of(node: fx.Node) -> tuple[torch.Size, torch.dtype] | None:
    """Shape and dtype of the tensor that it gave for the example, if it is one."""
    value = node.meta.get("value")
    return None if value is None else (value.shape, value.dtype)


def settings_of(flat: FlatGraph, conv: Any) -> tuple[Pair, ...] | None:
    """Stride, padding and dilation of a convolution without groups, whose weights are the model's own."""
    if not is_convolution(flat, conv) or argument(conv, 6, "groups") not in (None, 1):
        return None
    if (look := look_of(conv)) is None or len(look[0]) != 4:
        return None
    read = [node for node in (argument(conv, 1, "weight"), argument(conv, 2, "bias")) if node is not None]
    if not all(isinstance(held(flat, node), nn.Parameter) and is_convolved_with(flat, node) for node in read):
        return None
    places = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    given = (argument(conv, place, name) for place, name, _ in places)
    found = [pair(default if size is None else size) for size, (*_, default) in zip(given, places, strict=True)]
    pairs = [(size[0], size[1]) for size in found if size is not None]
    return tuple(pairs) if len(pairs) == len(places) else None


def is_convolved_with(flat: FlatGraph, read: fx.Node) -> bool:
    """Does nothing else than convolutions read it, so that it is cast for all of them where there is autocast?"""
    same = (node for node in flat.graph.find_nodes(op="get_attr") if node.target == read.target)
    return all(user.target in (torch.conv2d, convolve_relu) for node in same for user in node.users)


def is_written(flat: FlatGraph, conv: fx.Node, relu: fx.Node) -> bool:
    """May anything between the two write to what the convolution reads, which it will then read at the ReLU?"""
    node = conv.next
    while node is not relu and not writes(flat, node):
        node = node.next
    return node is not relu


@torch.no_grad()
def bias_of(flat: FlatGraph, conv: Convolution) -> fx.Node:
    """Its bias, and with it that of another convolution in the sum; zeros where there is none."""
    own, weight = argument(conv.node, 2, "bias"), argument(conv.node, 1, "weight")
    others = given_up(flat, conv.other)
    if own is not None and others is None:
        return flat.graph.get_attr(str(own.target))
    kernel = flat.get_parameter(str(weight.target))
    biases = (flat.get_parameter(str(node.target)) for node in (own, others) if node is not None)
    return kept(flat, f"{weight.target}_bias", sum(biases, kernel.new_zeros(len(kernel))))


def given_up(flat: FlatGraph, other: fx.Node | None) -> fx.Node | None:
    """The bias of another convolution that none but the sum reads, which now has none."""
    if not is_convolution(flat, other) or other is None or len(other.users) > 1:
        return None
    bias: fx.Node | None = argument(other, 2, "bias")
    if not isinstance(held(flat, bias), nn.Parameter):
        return None
    other.update_arg(2, None) if len(other.args) > 2 else other.update_kwarg("bias", None)
    return bias
