"""Stem of a ResNet as one operation: conv2d, bias, ReLU and a max pool of 3 x 3 pixels with stride 2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, uses
from ..inlining import argument, drop_unused_
from ..kernels.stem import MIN_PIXELS_EAGER, MIN_PIXELS_GRAPH, can_tile, stem
from ._context import Context, has_triton
from ._nodes import add_parameter, as_pair, is_conv2d, is_relu, sizes_of

AFTER = ("channels_last",)  # its result has the memory format of its weight


def apply_(flat: FlatGraph, context: Context) -> int:
    if not has_triton(flat):
        return 0
    min_pixels = MIN_PIXELS_GRAPH if context.launches_are_free else MIN_PIXELS_EAGER
    for pool in [node for node in flat.graph.nodes if is_stem_pool(flat, node)]:
        if fuse_(flat, pool, min_pixels):
            drop_unused_(flat)
            return 1
    return 0


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), pool), torch.randn(3, 3, 16, 16)


def is_stem_pool(flat: FlatGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        pool: Any = flat.get_submodule(str(node.target))
        if type(pool) is not nn.MaxPool2d:
            return False
        sizes = pool.kernel_size, pool.stride, pool.padding
        others = pool.dilation, pool.ceil_mode, pool.return_indices
    elif node.op == "call_function" and node.target in (F.max_pool2d, torch.max_pool2d):
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        found = [argument(node, place, name) for place, name in enumerate(names, start=1)]
        sizes, others = tuple(found[:3]), tuple(found[3:])
    else:
        return False
    plain = as_pair(others[0], 1) == (1, 1) and not any(others[1:])
    return plain and [as_pair(size) for size in sizes] == [(3, 3), (2, 2), (1, 1)]


@torch.no_grad()
def fuse_(flat: FlatGraph, pool: fx.Node, min_pixels: int) -> bool:
    relu: Any = argument(pool, 0, "input")
    conv: Any = argument(relu, 0, "input") if is_relu(relu) else None
    if not is_conv2d(flat, conv) or not len(conv.users) == len(relu.users) == 1:
        return False
    read, bias = argument(conv, 1, "weight"), argument(conv, 2, "bias")
    weight, sizes = held(flat, read), stride_and_padding(conv)
    if weight is None or sizes is None or not can_fuse(conv, weight) or uses(flat, read) > 1:
        return False
    shift = weight.new_zeros(len(weight)) if bias is None else held(flat, bias)
    if shift is None or shift.shape != (len(weight),) or (bias is not None and uses(flat, bias) > 1):
        return False  # the model's code computes it, or reads it elsewhere too
    # with one input channel a weight is contiguous in both formats; torch then goes by its strides
    channels_last = weight.is_contiguous(memory_format=torch.channels_last) and weight.stride(1) == 1
    with flat.graph.inserting_before(conv):  # its input may be written to later
        kernel = flat.graph.get_attr(str(read.target))
        kernel.meta["cast"] = True  # the bias is added in float32
        added = add_parameter(flat, f"{read.target}_bias", shift.reshape(-1, 1, 1))
        given = (argument(conv, 0, "input"), kernel, added, *sizes, channels_last, min_pixels)
        made = flat.graph.call_function(stem, given)
    made.meta["value"] = pool.meta.get("value")
    pool.replace_all_uses_with(made)
    for node in (pool, relu, conv):  # one by one: nodes that write in place count as used
        flat.graph.erase_node(node)
    return True


def can_fuse(conv: fx.Node, weight: Tensor) -> bool:
    """True for a float32 convolution of images that the kernels' tiles cover."""
    image = argument(conv, 0, "input").meta.get("value")
    return weight.dtype is torch.float32 and can_tile(weight) and image is not None and image.dim() == 4


def stride_and_padding(conv: fx.Node) -> tuple[int, int] | None:
    """Where they are the same in both directions, without dilation and groups."""
    sizes = sizes_of(conv)
    if sizes is None or sizes[2] != (1, 1) or any(one != other for one, other in sizes):
        return None
    return sizes[0][0], sizes[1][0]
