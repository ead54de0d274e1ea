"""Stem of a ResNet as one operation: conv2d, max pool, bias and ReLU, as `maxpool_relu` orders them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, uses
from ..inlining import argument, drop_unused_
from ..kernels.stem import MIN_PIXELS_EAGER, MIN_PIXELS_GRAPH, can_tile, stem
from ._context import Context, has_triton
from ._nodes import MAX_POOLS, ONE, add_parameter, as_pair, is_conv2d

AFTER = ("channels_last",)  # its result has the memory format of its weight


def apply_(flat: FlatGraph, context: Context) -> int:
    if not has_triton(flat):
        return 0
    for relu in flat.graph.find_nodes(op="call_function", target=torch.relu_):
        if fuse_(flat, relu, MIN_PIXELS_GRAPH if context.launches_are_free else MIN_PIXELS_EAGER):
            drop_unused_(flat)
            return 1
    return 0


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), pool), torch.randn(3, 3, 16, 16)


def has_stem(model: nn.Module) -> bool:
    return isinstance(model, FlatGraph) and bool(model.graph.find_nodes(op="call_function", target=stem))


@torch.no_grad()
def fuse_(flat: FlatGraph, relu: fx.Node, min_pixels: int) -> bool:
    gone: list[Any] = [relu]
    pool: Any = argument(relu, 0, "input")
    added = pool.op == "call_method" and pool.target == "add_" and len(pool.args) == 2 and not pool.kwargs
    if added:
        gone.append(pool)
        pool, bias = pool.args
    conv: Any = argument(pool, 0, "input") if pool.op in ("call_module", "call_function") else None
    if not is_conv2d(flat, conv) or any(len(node.users) > 1 for node in (conv, pool, *gone[1:])):
        return False
    if added and argument(conv, 2, "bias") is not None:  # two of them
        return False
    bias = bias if added else argument(conv, 2, "bias")
    weight, sizes = held(flat, argument(conv, 1, "weight")), sizes_of(flat, conv, pool)
    if weight is None or sizes is None or not can_fuse(flat, conv, weight, sizes):
        return False
    shape = (len(weight), 1, 1) if added else (len(weight),)
    stored = weight.new_zeros(shape) if bias is None else held(flat, bias)
    if stored is None or stored.shape != shape or (bias is not None and uses(flat, bias) > 1):
        return False  # the model's code computes it, broadcasts it otherwise, or reads it elsewhere too
    name = str(argument(conv, 1, "weight").target)
    # with one input channel a weight is contiguous in both formats; torch then goes by its strides
    channels_last = weight.is_contiguous(memory_format=torch.channels_last) and weight.stride(1) == 1
    with flat.graph.inserting_before(conv):  # its input may be written to later
        read = flat.graph.get_attr(name)
        read.meta["cast"] = True  # the bias is added in float32
        shift = add_parameter(flat, f"{name}_bias", stored.reshape(-1, 1, 1))
        given = (argument(conv, 0, "input"), read, shift, sizes, channels_last, min_pixels)
        made = flat.graph.call_function(stem, given)
    made.meta["value"] = relu.meta.get("value")
    relu.replace_all_uses_with(made)
    for node in (*gone, pool, conv):  # one by one: nodes that write in place count as used
        flat.graph.erase_node(node)
    return True


def can_fuse(flat: FlatGraph, conv: fx.Node, weight: Tensor, sizes: tuple[int, ...]) -> bool:
    """True for a float32 convolution of images that the kernels' tiles cover, whose weight has no other reader."""
    image = argument(conv, 0, "input").meta.get("value")
    plain = argument(conv, 5, "dilation") in ONE and argument(conv, 6, "groups") in (None, 1)
    alone = uses(flat, argument(conv, 1, "weight")) == 1
    tiled = weight.dtype is torch.float32 and can_tile(weight, sizes)
    return plain and alone and tiled and image is not None and image.dim() == 4


def sizes_of(flat: FlatGraph, conv: fx.Node, pool: fx.Node) -> tuple[int, ...] | None:
    """Strides and paddings of the two, where they are the same in both directions."""
    found: list[Any] = [as_pair(argument(conv, 3, "stride"), 1), as_pair(argument(conv, 4, "padding"), 0)]
    if pool.op == "call_module":
        layer: Any = flat.get_submodule(str(pool.target))
        if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices or layer.dilation not in ONE:
            return None
        found += [as_pair(layer.kernel_size), as_pair(layer.stride), as_pair(layer.padding)]
    else:
        if pool.target not in MAX_POOLS or argument(pool, 5, "ceil_mode") or argument(pool, 6, "return_indices"):
            return None
        if argument(pool, 4, "dilation") not in ONE:
            return None
        window, step = argument(pool, 1, "kernel_size"), argument(pool, 2, "stride")
        found += [as_pair(window), as_pair(step or window), as_pair(argument(pool, 3, "padding"), 0)]
    square = all(pair is not None and pair[0] == pair[1] for pair in found)
    return tuple(pair[0] for pair in found) if square else None
