"""What a flat graph computes where a layer has taken up the operator after it: M u + (M s W2) h + shift.

How is a matter of what costs: launches for few tokens, bytes for many, and what a compiler can join.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..fast.graph_module import FlatGraph
from ..fast.inlining import argument
from ..fast.kernels._dispatch import triton_runs_on
from ..fast.kernels.linear_residual import can_tile, linear_residual

# multiplications that wait for Python and not for the GPU: those of a thousand tokens of width 384
FEW = 1024 * 384 * 384


@dataclass(frozen=True, eq=False, kw_only=True)
class Match:
    """The nodes of the formula, from its result back to the layer, and its new weights."""

    gone: tuple[Any, ...]  # what the new product stands for
    u: Any
    weight: Tensor = field(repr=False)  # M s W2
    bias: Tensor | None = field(repr=False)  # M s b2 + c
    mixing: Tensor = field(repr=False)  # M

    @property
    def h(self) -> Any:
        return argument(self.gone[-1], 0, "input")

    @property
    def weight_node(self) -> Any:
        return argument(self.gone[-1], 1, "weight")


def write_(flat: FlatGraph, match: Match, *, mixed: bool, compiled: bool) -> None:
    """Put the product in the place of what it stands for."""
    kept = match.u.meta["value"]
    if mixed:
        own = triton_runs_on(match.weight.device) and can_tile(*match.weight.shape)
        make = joined_in_half if compiled else in_one_kernel if own else in_half
    else:
        make = apart if compiled else joined if kept.numel() * kept.shape[-1] <= FEW else in_place
    with flat.graph.inserting_before(match.gone[0]):
        made = make(Pen(flat, match))
    match.gone[0].replace_all_uses_with(made)
    for node in match.gone:
        flat.graph.erase_node(node)


class Pen:
    """Writes nodes and weights into the graph."""

    def __init__(self, flat: FlatGraph, match: Match) -> None:
        self.flat, self.match, self.width = flat, match, len(match.mixing)
        self.key = str(match.weight_node.target)
        self.trained = flat.get_parameter(self.key).requires_grad

    def kept(self, role: str, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        name = f"{self.key}_{role}"
        self.flat.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=self.trained))
        return self.flat.graph.get_attr(name)

    def linear(self, h: Any, weight: Tensor) -> fx.Node:
        given = h, self.kept("absorbing", weight), self.kept("shift", self.match.bias)
        return self.flat.graph.call_function(F.linear, given)

    def branch(self) -> Tensor:
        """W = M - I, for where u itself is added in float32."""
        mixing = self.match.mixing
        return mixing - torch.eye(len(mixing), dtype=mixing.dtype, device=mixing.device)

    def beside(self, u: Any) -> fx.Node:
        """[h, u]"""
        last = self.match.u.meta["value"].dim() - 1
        return self.flat.graph.call_function(torch.cat, ((self.match.h, u), last))

    def add(self, one: Any, other: Any) -> fx.Node:
        return self.flat.graph.call_function(torch.add, (one, other))

    def call(self, method: str, *given: Any) -> fx.Node:
        return self.flat.graph.call_method(method, given)

    def rows(self, value: fx.Node) -> fx.Node:
        return self.call("reshape", value, -1, self.width)


def joined(pen: Pen) -> fx.Node:
    """linear([h, u], [M s W2, M]): as many operations as the layer and its sum."""
    return pen.linear(pen.beside(pen.match.u), torch.cat((pen.match.weight, pen.match.mixing), 1))


def apart(pen: Pen) -> fx.Node:
    """linear(h, M s W2) + linear(u, M), for a compiler, which adds them where the result is used.

    Joined they are one product less, which did not pay: an H200 took as long for one image as for all the blocks.
    """
    mixed = pen.flat.graph.call_function(F.linear, (pen.match.u, pen.kept("mixing", pen.match.mixing)))
    return pen.add(pen.linear(pen.match.h, pen.match.weight), mixed)


def joined_in_half(pen: Pen) -> fx.Node:
    """u + linear([h, u], [M s W2, W]), the product in half precision: a compiler writes u where it writes h."""
    u = pen.match.u
    both = pen.beside(pen.call("type_as", u, pen.match.h))
    return pen.add(u, pen.linear(both, torch.cat((pen.match.weight, pen.branch()), 1)))


def in_place(pen: Pen) -> fx.Node:
    """v.addmm_(u, M^T), on what the layer has just made; a user's own autocast casts no such product, so we do."""
    u = pen.match.u
    v = pen.call("type_as", pen.linear(pen.match.h, pen.match.weight), u)
    mixing = pen.call("type_as", pen.kept("mixing", pen.match.mixing.t()), u)
    return pen.call("view_as", pen.call("addmm_", pen.rows(v), pen.rows(u), mixing), u)


def in_one_kernel(pen: Pen) -> fx.Node:
    """The same as `in_half`, the sum included, in a kernel of our own: as many launches as the layer alone."""
    weights = pen.kept("absorbing", pen.match.weight), pen.kept("shift", pen.match.bias)
    branch = pen.kept("mixing", pen.branch())
    for node in (weights[0], branch):
        node.meta["cast"] = True
    given = pen.match.u, pen.match.h, *weights, branch
    return pen.flat.graph.call_function(linear_residual, given)


def in_half(pen: Pen) -> fx.Node:
    """u + (v + W u), the bracket in half precision, where a product takes a tenth of the time."""
    u = pen.match.u
    v = pen.linear(pen.match.h, pen.match.weight)
    branch = pen.kept("mixing", pen.branch().t())
    branch.meta["cast"] = True  # autocast does not, as the product is in place
    product = pen.call("addmm_", pen.rows(v), pen.rows(pen.call("type_as", u, v)), branch)
    return pen.add(u, pen.call("view_as", product, u))
