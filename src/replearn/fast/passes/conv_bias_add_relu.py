"""Convolutions with the sums and ReLUs after them, which cuDNN computes in one launch.

The pass groups each into one node that torch computes. `fuse_validated_` then compares cuDNN's result with torch's
on the example, and hands cuDNN those that agree.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, is_sum
from ..inlining import argument, drop_unused_, run_on
from ..kernels.conv_bias_add_relu import conv_bias_add_relu, failure_of, reference
from ._context import Context
from ._nodes import Pair, add_parameter, is_conv2d, is_relu, sizes_of, written_between

AFTER = ("stem",)


def apply_(flat: FlatGraph, context: Context) -> int:
    """Group each ReLU of a convolution, or of its sum with something else.

    Left are convolutions with groups, results that something else reads before the ReLU, tensors that are written
    to in between, sums that broadcast or mix dtypes, and weights that something else than convolutions reads.
    """
    if not context.fuse:
        return 0
    count = 0
    for node in list(flat.graph.nodes):
        if (match := match_of(flat, node)) is not None:
            group_(flat, node, match)
            count += 1
    drop_unused_(flat)
    return count


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.conv1(x))
            return torch.relu(self.conv2(y) + y)

    return Block(), torch.randn(3, 4, 5, 5)


def fuse_validated_(flat: FlatGraph, example: Any, dtype: torch.dtype | None) -> int:
    """Hand cuDNN every group whose result on the example agrees with torch's; how many. Others stay torch's."""
    validating = Validating(flat)
    run_on(example, validating, flat, dtype)
    for node, failure in validating.failures.items():
        if failure is None:
            node.target = conv_bias_add_relu
    flat.recompile()
    failed = [failure for failure in validating.failures.values() if failure is not None]
    if failed:
        warnings.warn(
            f"fuse=True: {len(failed)} of {len(validating.failures)} convolutions stay torch's ({failed[0]}).",
            stacklevel=4,
        )
    return len(validating.failures) - len(failed)


class Validating(fx.Interpreter):
    """Runs a graph, and compares cuDNN with torch at every group."""

    def __init__(self, flat: FlatGraph) -> None:
        super().__init__(flat)
        self.failures: dict[fx.Node, str | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target is reference:
            given = self.fetch_args_kwargs_from_env(n)[0]
            self.failures[n] = failure_of(*given)
        return super().run_node(n)


class Match(NamedTuple):
    """A convolution that can be grouped, and the sum that it is in."""

    conv: fx.Node
    sizes: tuple[Pair, ...]
    total: fx.Node | None
    other: fx.Node | None


def match_of(flat: FlatGraph, relu: fx.Node) -> Match | None:
    """The convolution whose ReLU, or whose sum's ReLU, this is; of two in a sum the later one."""
    if not is_relu(relu):
        return None
    before: Any = argument(relu, 0, "input")
    ways: list[tuple[Any, fx.Node | None, fx.Node | None]] = [(before, None, None)]
    if is_sum(before):
        one, two = before.args
        ways = sorted(((one, before, two), (two, before, one)), key=lambda way: way[0], reverse=True)
    for conv, total, other in ways:
        sizes = fusable_sizes(flat, conv)
        if sizes is None or (total is not None and len(total.users) > 1) or written_between(flat, conv, relu):
            continue
        if len(conv.users) == 1 and (other is None or (other is not conv and same_value(other, conv))):
            return Match(conv, sizes, total, other)
    return None


def same_value(one: fx.Node, other: fx.Node) -> bool:
    """True if both gave tensors of one shape and dtype on the example."""
    first, second = one.meta.get("value"), other.meta.get("value")
    if first is None or second is None:
        return False
    return bool(first.shape == second.shape and first.dtype is second.dtype)


def fusable_sizes(flat: FlatGraph, conv: Any) -> tuple[Pair, ...] | None:
    """Stride, padding and dilation of a convolution without groups, whose weights are parameters."""
    if not is_conv2d(flat, conv):
        return None
    value = conv.meta.get("value")
    if value is None or value.dim() != 4:
        return None
    read = [node for node in (argument(conv, 1, "weight"), argument(conv, 2, "bias")) if node is not None]
    if not all(isinstance(held(flat, node), nn.Parameter) and only_convolved(flat, node) for node in read):
        return None
    return sizes_of(conv)


def only_convolved(flat: FlatGraph, read: fx.Node) -> bool:
    """True if only convolutions read it, so that autocast casts it for all readers."""
    same = (node for node in flat.graph.find_nodes(op="get_attr") if node.target == read.target)
    return all(user.target in (torch.conv2d, reference) for node in same for user in node.users)


def group_(flat: FlatGraph, relu: fx.Node, match: Match) -> None:
    with flat.graph.inserting_before(relu):
        weight = flat.graph.get_attr(str(argument(match.conv, 1, "weight").target))
        bias = bias_of(flat, match)
        weight.meta["cast"] = bias.meta["cast"] = True
        given = argument(match.conv, 0, "input"), weight, bias, match.other, *match.sizes
        made = flat.graph.call_function(reference, given)
    made.meta["value"] = relu.meta.get("value")
    relu.replace_all_uses_with(made)
    for node in (relu, match.total, match.conv):  # one by one: nodes that write in place count as used
        if node is not None:
            flat.graph.erase_node(node)


def bias_of(flat: FlatGraph, match: Match) -> fx.Node:
    """Its bias, or zeros."""
    own, weight = argument(match.conv, 2, "bias"), argument(match.conv, 1, "weight")
    if own is not None:
        return flat.graph.get_attr(str(own.target))
    kernel = flat.get_parameter(str(weight.target))
    return add_parameter(flat, f"{weight.target}_bias", kernel.new_zeros(len(kernel)))
