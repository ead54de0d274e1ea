"""Convolution weights in channels_last, the memory format of cuDNN's half-precision kernels.

In another format cuDNN copies before and after every convolution. torch convolves in channels_last where the input
or the weight is, so the results follow the weights. Values stay the same and strides do not: a graph whose outputs
on the example change by more than rounding, or in their strides, keeps its format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ...errors import ReplearnError
from ..folding import CONVOLUTIONS
from ..graph_module import FlatGraph
from ..inlining import argument, run_on
from ..kernels._dispatch import HALF
from ..verify import compare, exact, tensors_in
from ._context import Context, on_cudnn
from ._nodes import is_conv2d

AFTER = ("token_slice",)
ROUNDING = 5e-2  # of the largest output; what depends on strides differs by far more


@torch.no_grad()
def apply_(flat: FlatGraph, context: Context) -> int:
    """Bring the weights of all convolutions into channels_last, or none.

    Left are graphs that depend on strides; with groups in a convolution, for which channels_last can be slower;
    with one that is not of images, or not in half precision (or float32, if convolutions are fused); and with a
    single convolution, as a transformer's patches.
    """
    if (context.dtype is None and not context.fuse) or not on_cudnn(flat):
        return 0
    dtypes = HALF if context.dtype else (*HALF, torch.float32)
    convolutions = flat.graph.find_nodes(op="call_function", target=torch.conv2d)
    others = any(isinstance(module, CONVOLUTIONS) for module in flat.modules())
    if len(convolutions) < 2 or others or not all(can_reorder(flat, node, dtypes) for node in convolutions):
        return 0
    before = outputs(flat, context)
    names = {str(argument(node, 1, "weight").target) for node in convolutions}
    weights = {name: flat.get_parameter(name) for name in names}
    for name, weight in weights.items():
        ordered = weight.to(memory_format=torch.channels_last)
        setattr(flat, name, nn.Parameter(ordered, requires_grad=weight.requires_grad))
    if same_outputs(flat, before, context):
        return len(convolutions)
    for name, weight in weights.items():
        setattr(flat, name, weight)
    return 0


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""
    convolutions = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.randn(3, 3, 8, 8)


def outputs(flat: FlatGraph, context: Context) -> list[Tensor]:
    with exact():
        return tensors_in(run_on(context.example, fx.Interpreter(flat), flat, context.dtype))


def same_outputs(flat: FlatGraph, before: list[Tensor], context: Context) -> bool:
    """True if the graph still gives these values, to rounding, with these strides."""
    try:
        after = outputs(flat, context)
        compare(before, after, "the graph in channels_last", ROUNDING)
    except ReplearnError:  # as a view of strides that are gone
        return False
    return [tensor.stride() for tensor in before] == [tensor.stride() for tensor in after]


def can_reorder(flat: FlatGraph, conv: fx.Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """True for a convolution of images in these dtypes, without groups, whose weight only convolutions read."""
    made = conv.meta.get("value")
    if not is_conv2d(flat, conv) or made is None or made.dim() != 4 or made.dtype not in dtypes:
        return False
    name = str(argument(conv, 1, "weight").target)
    weight: Any = getattr(flat, name)
    elsewhere = any(weight is other for child in flat.children() for other in child.parameters())
    readers = (node for node in flat.graph.find_nodes(op="get_attr") if node.target == name)
    alone = all(user.target is torch.conv2d for node in readers for user in node.users)
    grouped = argument(conv, 6, "groups") not in (None, 1)
    return isinstance(weight, nn.Parameter) and alone and not (elsewhere or grouped)
