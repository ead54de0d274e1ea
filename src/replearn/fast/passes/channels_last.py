"""Order the weights of a flat graph's convolutions as half precision wants them: channels_last.

cuDNN's kernels for half precision take and give NHWC; of tensors in another order it makes copies, before and
after every convolution. torch convolves in channels_last where the input or the weight is. With weights in that
order the first convolution's result is, and so is what comes of it. The numbers are the same and their order in
memory is not: a graph that may depend on it is left alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...blocks.tracing import is_measure
from ..folding import CONVOLUTIONS
from ..graph_module import FlatGraph
from ..inlining import argument, writes_in_place
from .maxpool_relu import POOLS, is_convolution

# What gives the same numbers for an input in any order. Everything else may not: view, as_strided, stride, code of
# somebody else's.
FUNCTIONS = (
    *(operator.add, operator.mul, torch.add, torch.mul, torch.cat, torch.relu, torch.relu_, torch.sigmoid),
    *(torch.tanh, F.gelu, F.silu, F.leaky_relu, F.hardswish, F.avg_pool2d, F.adaptive_avg_pool2d, *POOLS),
)
METHODS = ("add", "add_", "mul", "mul_", "relu", "relu_", "sigmoid", "tanh")
MODULES = (
    *(nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d, nn.BatchNorm2d),
    *(nn.Hardsigmoid, nn.Hardswish, nn.LeakyReLU, nn.ReLU6, nn.Sigmoid),
)
RESHAPES = {"call_function": (torch.flatten, torch.reshape), "call_method": ("flatten", "reshape")}
OTHERS = (torch.conv1d, torch.conv3d)
HALF = (torch.float16, torch.bfloat16)
ONE = (1, (1, 1), [1, 1])
PLACES = ((2, 3), (3, 2), (-2, -1), (-1, -2))


def orders_by_channel(device: torch.device) -> bool:
    """Whether half precision is convolved in that order there: by cuDNN, not by a CPU or AMD's library."""
    return device.type == "cuda" and torch.version.hip is None


@torch.no_grad()
def order_convolutions_(flat: FlatGraph, dtypes: tuple[torch.dtype, ...] = HALF) -> None:
    """Bring the weights of all convolutions into channels_last order, in place; or leave the graph as it is.

    `note_values_` comes first, under the autocast which the graph will run under. Left are graphs whose outputs or
    other nodes may depend on the order; with groups in a convolution, for which NHWC can be slower, with one that
    is not of images, or gives other `dtypes`; and with a single convolution: a transformer's patches have a kernel
    of their own.
    """
    convolutions = flat.graph.find_nodes(op="call_function", target=torch.conv2d)
    if len(convolutions) < 2 or has_others(flat) or not all(fits(flat, node, dtypes) for node in convolutions):
        return
    if nobody_minds(flat):
        for name in {str(argument(node, 1, "weight").target) for node in convolutions}:
            weight = flat.get_parameter(name)
            ordered = weight.to(memory_format=torch.channels_last)
            setattr(flat, name, nn.Parameter(ordered, requires_grad=weight.requires_grad))


def has_others(flat: FlatGraph) -> bool:
    """Are there convolutions of other dimensions, or inside of modules?"""
    called = any(node.target in OTHERS for node in flat.graph.nodes if node.op == "call_function")
    return called or any(isinstance(module, CONVOLUTIONS) for module in flat.modules())


def fits(flat: FlatGraph, conv: fx.Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Is this a convolution of images in such numbers, without groups, whose weight none but such read?"""
    made = conv.meta.get("value")
    if not is_convolution(flat, conv) or made is None or made.dim() != 4 or made.dtype not in dtypes:
        return False
    if argument(conv, 6, "groups") not in (None, 1):
        return False
    name = str(argument(conv, 1, "weight").target)
    weight = getattr(flat, name)
    elsewhere = any(weight is other for child in flat.children() for other in child.parameters())
    readers = (node for node in flat.graph.find_nodes(op="get_attr") if node.target == name)
    alone = all(is_weight(node, user) for node in readers for user in node.users)
    return isinstance(weight, nn.Parameter) and alone and not elsewhere


def is_weight(node: fx.Node, user: fx.Node) -> bool:
    return user.target is torch.conv2d and argument(user, 0, "input") is not node


def nobody_minds(flat: FlatGraph) -> bool:
    """Does every node that sees a value in another order know it by its numbers alone, and no output show it?"""
    ordered: set[fx.Node] = set()  # what may lie in another order than before
    copied = False
    for node in flat.graph.nodes:
        if node.target is torch.conv2d:
            ordered.add(node)
        elif ordered.isdisjoint(node.all_input_nodes) or is_measure(node) or makes_one_pixel(flat, node):
            continue
        elif is_copied(node):
            # it may have been the same memory, where what is written to one is seen in the other
            copied = True
            if not is_only_read(flat, node):
                return False
        elif keeps_numbers(flat, node) and not (copied and writes(flat, node)):
            ordered.add(node)
        else:
            return False
    return True


def keeps_numbers(flat: FlatGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(flat.get_submodule(str(node.target))) in MODULES
    return node.target in {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op, ())


def makes_one_pixel(flat: FlatGraph, node: fx.Node) -> bool:
    """Does it give one number a channel, which is new memory and has one order alone?"""
    if node.op == "call_module":
        pool: Any = flat.get_submodule(str(node.target))
        return type(pool) is nn.AdaptiveAvgPool2d and pool.output_size in ONE
    if node.target in ("mean", torch.mean):
        places = argument(node, 1, "dim")
        return isinstance(places, (tuple, list)) and tuple(places) in PLACES and "out" not in node.kwargs
    return node.target is F.adaptive_avg_pool2d and argument(node, 1, "output_size") in ONE


def is_copied(node: fx.Node) -> bool:
    """Does it give the order that there was before: one row an image, or contiguous?"""
    if node.op == "call_method" and node.target == "contiguous":
        return len(node.args) == 1 and not node.kwargs
    if node.target not in RESHAPES.get(node.op, ()):
        return False
    given, made = argument(node, 0, "input").meta.get("value"), node.meta.get("value")
    if given is None or made is None:
        return False
    return bool(given.dim() == 4 and made.dim() == 2 and given.shape[0] == made.shape[0])


def is_only_read(flat: FlatGraph, node: fx.Node) -> bool:
    """Does nobody write to this value, in other shapes included?"""

    def reads(user: fx.Node) -> bool:
        if user.target in RESHAPES.get(user.op, ()) or (user.op == "call_method" and user.target == "view"):
            return is_only_read(flat, user)
        known = user.op == "output" or user.target in (F.linear, torch.conv2d) or is_measure(user)
        return known or (keeps_numbers(flat, user) and not writes(flat, user))

    return all(reads(user) for user in node.users)


def writes(flat: FlatGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(flat.get_submodule(str(node.target)), "inplace", False))
    return writes_in_place(node)
