"""Pool what a convolution gives before its bias and its ReLU, which then have fewer numbers to go over.

    maxpool(relu(conv(x) + b)) = relu(maxpool(conv(x)) + b)

Exact, rounding included (but for the sign of a zero): of two numbers the larger one stays so when b is added, when
the sum is rounded and when its ReLU is taken; a NaN stays one. A ResNet's stem is such a place, and so is the end
of each stage of a VGG.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..graph_module import FlatGraph, held, uses
from ..inlining import argument, drop_unused_

POOLS = (F.max_pool2d, torch.max_pool2d)
RELUS = {"call_function": (torch.relu, torch.relu_), "call_method": ("relu", "relu_")}


def pool_first_(flat: FlatGraph) -> None:
    """Move each such ReLU and bias behind its pool, in place; elsewhere nothing changes."""
    for pool in [node for node in flat.graph.nodes if makes_fewer(flat, node)]:
        relu: Any = argument(pool, 0, "input")
        conv: Any = argument(relu, 0, "input") if is_relu(relu) else None
        if is_convolution(flat, conv) and len(conv.users) == len(relu.users) == 1:
            write_(flat, pool, relu, conv, argument(conv, 2, "bias") if is_added_apart(flat, conv) else None)
    drop_unused_(flat)


def makes_fewer(flat: FlatGraph, node: fx.Node) -> bool:
    """Is this a max pool with a stride, which returns what it found and not where?

    One with a dilation is left alone: a window of it may lie in the padding, and give -inf, which no ReLU does.
    """
    if node.op == "call_module":
        pool: Any = flat.get_submodule(str(node.target))
        if type(pool) is not nn.MaxPool2d or pool.return_indices:
            return False
        stride, dilation = pool.stride, pool.dilation
    else:
        if node.op != "call_function" or node.target not in POOLS or argument(node, 6, "return_indices"):
            return False
        stride = argument(node, 2, "stride") or argument(node, 1, "kernel_size")
        dilation = argument(node, 4, "dilation") or 1
    return dilation in (1, (1, 1), [1, 1]) and stride not in (1, (1, 1), [1, 1])


def is_relu(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in RELUS.get(node.op, ())


def is_convolution(flat: FlatGraph, node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not torch.conv2d:
        return False
    weight = held(flat, argument(node, 1, "weight"))
    return weight is not None and weight.is_floating_point()


def is_added_apart(flat: FlatGraph, conv: fx.Node) -> bool:
    """Is the bias a launch of its own there, and a weight that nobody else reads?

    A CPU's kernels and some for groups add it themselves: at no cost, and before they round to half precision.
    """
    bias = argument(conv, 2, "bias")
    stored = held(flat, bias)
    if not isinstance(stored, nn.Parameter) or uses(flat, bias) > 1:
        return False
    return launches_biases(stored.device) and argument(conv, 6, "groups") in (None, 1)


def launches_biases(device: torch.device) -> bool:
    return device.type == "cuda"


def write_(flat: FlatGraph, pool: fx.Node, relu: fx.Node, conv: fx.Node, bias: fx.Node | None) -> None:
    pool.replace_input_with(relu, conv)
    flat.graph.erase_node(relu)
    with flat.graph.inserting_after(pool):
        last = flat.graph.call_function(torch.relu_, (pool,))  # what a pool gives is nobody else's
    pool.replace_all_uses_with(last, delete_user_cb=lambda user: user is not last)
    if bias is not None:
        if len(conv.args) > 2:
            conv.update_arg(2, None)
        else:
            conv.update_kwarg("bias", None)
        with flat.graph.inserting_before(last):
            # in place, since a bias in float32 must not widen what a user's own autocast made
            last.args = (flat.graph.call_method("add_", (pool, kept(flat, bias))),)


def kept(flat: FlatGraph, bias: fx.Node) -> fx.Node:
    """The bias in the shape that it is added in."""
    name, given = f"{bias.target}_pooled", flat.get_parameter(str(bias.target))
    while hasattr(flat, name):
        name += "_"
    shaped = nn.Parameter(given.detach().view(-1, 1, 1), requires_grad=given.requires_grad)
    flat.register_parameter(name, shaped)
    node = flat.graph.get_attr(name)
    node.meta["cast"] = True  # as autocast casts a convolution's bias
    return node
