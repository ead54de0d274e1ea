"""Convolution weights in channels_last, the memory format of cuDNN's half-precision kernels.

In another format cuDNN copies before and after every convolution. torch convolves in channels_last where the input
or the weight is, so the results follow the weights. Values stay the same and strides do not: a graph that may
depend on strides is left alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...blocks.tracing import is_measure
from ..folding import CONVOLUTIONS
from ..graph_module import FlatGraph
from ..inlining import argument
from ..kernels._dispatch import HALF
from ._context import Context, on_cudnn
from ._nodes import MAX_POOLS, ONE, is_conv2d, writes

AFTER = ("token_slice",)

# What gives the same values for inputs of any strides. Everything else may not: view, as_strided, stride, unknown
# code.
FUNCTIONS = (
    *(operator.add, operator.mul, torch.add, torch.mul, torch.cat, torch.relu, torch.relu_, torch.sigmoid),
    *(torch.tanh, F.gelu, F.silu, F.leaky_relu, F.hardswish, F.avg_pool2d, F.adaptive_avg_pool2d, *MAX_POOLS),
)
METHODS = ("add", "add_", "mul", "mul_", "relu", "relu_", "sigmoid", "tanh")
MODULES = (
    *(nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d, nn.BatchNorm2d),
    *(nn.Hardsigmoid, nn.Hardswish, nn.LeakyReLU, nn.ReLU6, nn.Sigmoid),
)
RESHAPES = {"call_function": (torch.flatten, torch.reshape), "call_method": ("flatten", "reshape")}
OTHERS = (torch.conv1d, torch.conv3d)
PLACES = ((2, 3), (3, 2), (-2, -1), (-1, -2))


@torch.no_grad()
def apply_(flat: FlatGraph, context: Context) -> int:
    """Bring the weights of all convolutions into channels_last, or none.

    Left are graphs whose outputs or other nodes may depend on strides; with groups in a convolution, for which
    channels_last can be slower; with one that is not of images, or not in half precision (or float32, if
    convolutions are fused); and with a single convolution, as a transformer's patches.
    """
    if (context.dtype is None and not context.fuse) or not on_cudnn(flat):
        return 0
    dtypes = HALF if context.dtype else (*HALF, torch.float32)
    convolutions = flat.graph.find_nodes(op="call_function", target=torch.conv2d)
    if (
        len(convolutions) < 2
        or has_other_convolutions(flat)
        or not all(can_reorder(flat, node, dtypes) for node in convolutions)
    ):
        return 0
    if not ignores_strides(flat):
        return 0
    for name in {str(argument(node, 1, "weight").target) for node in convolutions}:
        weight = flat.get_parameter(name)
        ordered = weight.to(memory_format=torch.channels_last)
        setattr(flat, name, nn.Parameter(ordered, requires_grad=weight.requires_grad))
    return len(convolutions)


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""
    convolutions = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.randn(3, 3, 8, 8)


def has_other_convolutions(flat: FlatGraph) -> bool:
    """True if there are convolutions of other dimensions, or inside of modules."""
    called = any(node.target in OTHERS for node in flat.graph.nodes if node.op == "call_function")
    return called or any(isinstance(module, CONVOLUTIONS) for module in flat.modules())


def can_reorder(flat: FlatGraph, conv: fx.Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """True for a convolution of images in these dtypes, without groups, whose weight only convolutions read."""
    made = conv.meta.get("value")
    if not is_conv2d(flat, conv) or made is None or made.dim() != 4 or made.dtype not in dtypes:
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


def ignores_strides(flat: FlatGraph) -> bool:
    """True if no node and no output depends on the strides of what convolutions give."""
    ordered: set[fx.Node] = set()  # what may have other strides than before
    copied = False
    for node in flat.graph.nodes:
        if node.target is torch.conv2d:
            ordered.add(node)
        elif ordered.isdisjoint(node.all_input_nodes) or is_measure(node) or makes_one_pixel(flat, node):
            continue
        elif restores_strides(node):
            # it may have been a view before, through which writes are seen
            copied = True
            if not is_only_read(flat, node):
                return False
        elif keeps_values(flat, node) and not (copied and writes(flat, node)):
            ordered.add(node)
        else:
            return False
    return True


def keeps_values(flat: FlatGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(flat.get_submodule(str(node.target))) in MODULES
    return node.target in {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op, ())


def makes_one_pixel(flat: FlatGraph, node: fx.Node) -> bool:
    """True if it gives one pixel, in new memory, which has one order alone."""
    if node.op == "call_module":
        pool: Any = flat.get_submodule(str(node.target))
        return type(pool) is nn.AdaptiveAvgPool2d and pool.output_size in ONE[:3]
    if node.target in ("mean", torch.mean):
        places = argument(node, 1, "dim")
        return isinstance(places, (tuple, list)) and tuple(places) in PLACES and "out" not in node.kwargs
    return node.target is F.adaptive_avg_pool2d and argument(node, 1, "output_size") in ONE[:3]


def restores_strides(node: fx.Node) -> bool:
    """True if its result has the strides of before: one row an image, or contiguous."""
    if node.op == "call_method" and node.target == "contiguous":
        return len(node.args) == 1 and not node.kwargs
    if node.target not in RESHAPES.get(node.op, ()):
        return False
    given, made = argument(node, 0, "input").meta.get("value"), node.meta.get("value")
    if given is None or made is None:
        return False
    return bool(given.dim() == 4 and made.dim() == 2 and given.shape[0] == made.shape[0])


def is_only_read(flat: FlatGraph, node: fx.Node) -> bool:
    """True if nothing writes to this value or a view of it."""

    def reads(user: fx.Node) -> bool:
        if user.target in RESHAPES.get(user.op, ()) or (user.op == "call_method" and user.target == "view"):
            return is_only_read(flat, user)
        known = user.op == "output" or user.target in (F.linear, torch.conv2d) or is_measure(user)
        return known or (keeps_values(flat, user) and not writes(flat, user))

    return all(reads(user) for user in node.users)
