"""Join a convolutional network's first layers in a flat graph, where kernels of ours compute them.

conv2d -> max pool -> bias -> ReLU, as `pool_first_` leaves a ResNet's stem.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, uses
from ..inlining import argument, drop_unused_
from ..kernels.stem import FEW, MANY, WINDOW, can_be_cut, stem
from .maxpool_relu import POOLS, is_convolution

ONE = (1, (1, 1), [1, 1], None)


def open_with_kernels_(flat: FlatGraph, *, few: bool) -> None:
    """Put one operation in the place of such layers, in place; where they are others, nothing changes.

    `few`: take our kernels for a few images too. `pool_first_` and `note_values_` come first.
    """
    for relu in flat.graph.find_nodes(op="call_function", target=torch.relu_):
        if write_(flat, relu, FEW if few else MANY):
            drop_unused_(flat)
            return


def opens_with_kernels(model: nn.Module) -> bool:
    """Is it a flat graph in float32 with such an operation? Under Autocast that is in half precision."""
    return isinstance(model, FlatGraph) and bool(model.graph.find_nodes(op="call_function", target=stem))


@torch.no_grad()
def write_(flat: FlatGraph, relu: fx.Node, many: int) -> bool:
    gone: list[Any] = [relu]
    pool: Any = argument(relu, 0, "input")
    added = pool.op == "call_method" and pool.target == "add_" and len(pool.args) == 2 and not pool.kwargs
    if added:
        gone.append(pool)
        pool, bias = pool.args
    conv: Any = argument(pool, 0, "input") if pool.op in ("call_module", "call_function") else None
    if not is_convolution(flat, conv) or any(len(node.users) > 1 for node in (conv, pool, *gone[1:])):
        return False
    if added and argument(conv, 2, "bias") is not None:  # two of them
        return False
    bias = bias if added else argument(conv, 2, "bias")
    weight, sizes = held(flat, argument(conv, 1, "weight")), sizes_of(flat, conv, pool)
    if weight is None or sizes is None or not fits(flat, conv, weight) or relu.meta.get("value") is None:
        return False
    shape = (len(weight), 1, 1) if added else (len(weight),)
    stored = weight.new_zeros(shape) if bias is None else held(flat, bias)
    if stored is None or stored.shape != shape or (bias is not None and uses(flat, bias) > 1):
        return False  # one that the model's code computes, spreads otherwise, or reads elsewhere too
    name = str(argument(conv, 1, "weight").target)
    # of one colour, a weight is contiguous in both orders; torch then goes by its strides too
    last = weight.is_contiguous(memory_format=torch.channels_last) and weight.stride(1) == 1
    with flat.graph.inserting_before(conv):  # where its input is what it was: it may be written later
        read = flat.graph.get_attr(name)
        read.meta["cast"] = True  # once, as autocast would at every call; the bias is added in float32
        shift = kept(flat, f"{name}_bias", stored.reshape(-1, 1, 1))
        made = flat.graph.call_function(stem, (argument(conv, 0, "input"), read, shift, sizes, last, many))
    made.meta["value"] = relu.meta["value"]
    relu.replace_all_uses_with(made)
    for node in (*gone, pool, conv):  # by hand: what writes in place counts as used
        flat.graph.erase_node(node)
    return True


def fits(flat: FlatGraph, conv: fx.Node, weight: Tensor) -> bool:
    """Is this a convolution of images that tiles of our kernels cover, with a weight that nobody else reads?"""
    image = argument(conv, 0, "input").meta.get("value")
    plain = argument(conv, 5, "dilation") in ONE and argument(conv, 6, "groups") in (None, 1)
    alone = uses(flat, argument(conv, 1, "weight")) == 1
    single = weight.dtype is torch.float32 and can_be_cut(weight)
    return plain and alone and single and image is not None and image.dim() == 4


def sizes_of(flat: FlatGraph, conv: fx.Node, pool: fx.Node) -> tuple[int, ...] | None:
    """Strides and zeros of the two, where they are numbers and the same in both directions."""
    found = [square(argument(conv, 3, "stride"), 1), square(argument(conv, 4, "padding"), 0)]
    if pool.op == "call_module":
        layer: Any = flat.get_submodule(str(pool.target))
        if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices or layer.dilation not in ONE:
            return None
        found += [square(layer.kernel_size), square(layer.stride), square(layer.padding)]
    else:
        if pool.target not in POOLS or argument(pool, 5, "ceil_mode") or argument(pool, 6, "return_indices"):
            return None
        if argument(pool, 4, "dilation") not in ONE:
            return None
        window, step = argument(pool, 1, "kernel_size"), argument(pool, 2, "stride")
        found += [square(window), square(step or window), square(argument(pool, 3, "padding"), 0)]
    sizes = tuple(size for size in found if size is not None)
    return sizes if len(sizes) == len(found) and sizes[2] <= WINDOW else None


def square(size: Any, default: int | None = None) -> int | None:
    """One number for both directions, if that is what is given."""
    if size is None:
        return default
    if isinstance(size, int):
        return size
    same = isinstance(size, (tuple, list)) and len(set(size)) == 1 and isinstance(size[0], int)
    return size[0] if same else None


def kept(flat: FlatGraph, name: str, tensor: Tensor) -> fx.Node:
    while hasattr(flat, name):
        name += "_"
    trained = any(parameter.requires_grad for parameter in flat.parameters())
    flat.register_parameter(name, nn.Parameter(tensor.detach().clone().contiguous(), requires_grad=trained))
    return flat.graph.get_attr(name)
