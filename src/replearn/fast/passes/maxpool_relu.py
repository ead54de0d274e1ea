"""Max pool before bias and ReLU, which then run on fewer values.

    maxpool(relu(conv(x) + b)) = relu(maxpool(conv(x)) + b)

Exact, rounding included (but for the sign of a zero): adding b, rounding and ReLU are monotonic, and NaN stays.
It applies to a ResNet's stem and to the stages of a VGG.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, uses
from ..inlining import argument, drop_unused_
from ._context import Context
from ._nodes import MAX_POOLS, ONE, add_parameter, drop_bias_, is_conv2d, is_relu

AFTER = ()


def apply_(flat: FlatGraph, context: Context) -> int:
    """Move each ReLU, and the bias of its convolution, behind the pool that follows."""
    count = 0
    for pool in [node for node in flat.graph.nodes if is_strided_max_pool(flat, node)]:
        relu: Any = argument(pool, 0, "input")
        conv: Any = argument(relu, 0, "input") if is_relu(relu) else None
        if is_conv2d(flat, conv) and len(conv.users) == len(relu.users) == 1:
            move_(flat, pool, relu, conv)
            count += 1
    drop_unused_(flat)
    return count


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), torch.randn(3, 3, 8, 8)


def is_strided_max_pool(flat: FlatGraph, node: fx.Node) -> bool:
    """True for a max pool with a stride that returns no indices.

    Not with a dilation: a window may then lie in the padding and give -inf, which no ReLU does.
    """
    if node.op == "call_module":
        pool: Any = flat.get_submodule(str(node.target))
        if type(pool) is not nn.MaxPool2d or pool.return_indices:
            return False
        stride, dilation = pool.stride, pool.dilation
    else:
        if node.op != "call_function" or node.target not in MAX_POOLS or argument(node, 6, "return_indices"):
            return False
        stride = argument(node, 2, "stride") or argument(node, 1, "kernel_size")
        dilation = argument(node, 4, "dilation") or 1
    return dilation in ONE and stride not in ONE


def move_(flat: FlatGraph, pool: fx.Node, relu: fx.Node, conv: fx.Node) -> None:
    pool.replace_input_with(relu, conv)
    flat.graph.erase_node(relu)
    with flat.graph.inserting_after(pool):
        last = flat.graph.call_function(torch.relu_, (pool,))  # the pool's result has no other reader
    last.meta = {"value": pool.meta.get("value")}
    pool.replace_all_uses_with(last, delete_user_cb=lambda user: user is not last)
    if (bias := separate_bias(flat, conv)) is not None:
        drop_bias_(conv)
        with flat.graph.inserting_before(last):
            shaped = flat.get_parameter(str(bias.target)).view(-1, 1, 1)
            # in place: a float32 bias must not widen what a user's own autocast made
            stored = add_parameter(flat, f"{bias.target}_pooled", shaped, cast=True)
            total = flat.graph.call_method("add_", (pool, stored))
        total.meta = {"value": pool.meta.get("value")}
        last.args = (total,)


def separate_bias(flat: FlatGraph, conv: fx.Node) -> fx.Node | None:
    """The bias of a convolution, if it is a launch of its own and read nowhere else.

    A CPU's kernels and some for groups add it themselves: at no cost, and before rounding to half precision.
    """
    bias: fx.Node | None = argument(conv, 2, "bias")
    stored = held(flat, bias)
    if bias is None or not isinstance(stored, nn.Parameter) or uses(flat, bias) > 1:
        return None
    return bias if launches_biases(stored.device) and argument(conv, 6, "groups") in (None, 1) else None


def launches_biases(device: torch.device) -> bool:
    return device.type == "cuda"
