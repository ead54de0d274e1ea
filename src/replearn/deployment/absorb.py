"""Take an operator's linear map up into the linear layer before it, where it costs no operation of its own.

    y  = u + v,  v = s (W2 h + b2)          how a transformer's block ends, s being its LayerScale
    y' = M y + c                            the operator: M = W + I
       = M u + (M s W2) h + (M s b2 + c)    one product in place of the sum

In a flat graph it can be read off who uses a value, and what a weight goes into. Exact but for rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..fast.graph_module import PATH, FlatGraph, held, is_sum, uses
from ..fast.inlining import argument, drop_unused_, note_values_
from ..fast.kernels._dispatch import triton_runs_on
from ..fast.kernels.linear_residual import can_tile, linear_residual

ABSORBED = "absorbed"  # in the graph's `meta`: which operators, into which layers
PRODUCTS = {"call_function": (operator.mul, torch.mul), "call_method": ("mul", "mul_")}
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


def absorb_(
    flat: FlatGraph, operators: Collection[str], example: Any, dtype: torch.dtype | None, *, compiled: bool
) -> FlatGraph:
    """Have the layers before the named operators take them up, in place, where the graph has the formula.

    `dtype` is that of the autocast which the graph will run under. Whether it will be compiled, and the example's
    size, choose between ways to compute the same: fewer operations for few tokens, fewer bytes for many.
    """
    note_values_(flat, example, dtype)
    taken = []
    for node in flat.graph.find_nodes(op="call_function", target=F.linear):
        path = path_of(argument(node, 1, "weight"))
        name = next((name for name in operators if path.startswith(f"{name}.")), None)
        match = None if name is None else match_of(flat, node)
        if match is not None:
            taken.append(f"{name} -> {path_of(match.weight_node).rpartition('.')[0]}")
            write_(flat, match, mixed=dtype is not None, compiled=compiled)
    drop_unused_(flat)
    flat.meta[ABSORBED] = tuple(taken)
    return flat


def path_of(node: Any) -> str:
    return str(node.meta.get(PATH, "")) if isinstance(node, fx.Node) else ""


@torch.no_grad()
def match_of(flat: FlatGraph, linear: Any) -> Match | None:
    """The formula that ends in this linear map, if it is there and nobody else sees what would change."""
    y, mixing = argument(linear, 0, "input"), held(flat, argument(linear, 1, "weight"))
    gone: tuple[Any, ...] = (linear,)
    if not is_sum(y) or mixing is None:
        return None
    if set(y.users) != {linear}:  # y + W y, as it is where sums are not merged
        (total, *others) = linear.users
        if others or set(y.users) != {linear, total} or not is_sum(total):
            return None
        mixing, gone = mixing + eye_like(mixing), (total, linear)
    for u, v in (y.args, y.args[::-1]):
        way, scales = way_to_layer(flat, v)
        if way and u is not v and fits(flat, u, way[-1], mixing):
            bias = held(flat, argument(linear, 2, "bias"))
            return multiplied(flat, (*gone, y, *way), u, scales, mixing, bias)
    return None


def eye_like(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def way_to_layer(flat: FlatGraph, v: Any) -> tuple[list[Any], list[Any]]:
    """The nodes from a term of a sum back to the linear layer that made it, and the scales among them."""
    way, scales = [v], []
    while len(v.users) == 1 and v.target is not F.linear:
        factors = [factor(flat, value) for value in v.args] if v.target in PRODUCTS.get(v.op, ()) else []
        if len(factors) != 2 or factors.count(None) != 1:
            return [], []
        place = factors.index(None)
        scales.append(factors[1 - place])
        v = v.args[place]
        way.append(v)
    return (way, scales) if len(v.users) == 1 else ([], [])


def factor(flat: FlatGraph, value: Any) -> Tensor | float | None:
    """A number, or a stored one for each channel."""
    if isinstance(value, (int, float)):
        return value
    stored = held(flat, value)
    return stored if stored is not None and stored.dim() <= 1 else None


def fits(flat: FlatGraph, u: Any, layer: Any, mixing: Tensor) -> bool:
    """Do shapes and dtypes agree, and are the layer's weights used by nobody else?"""
    weights = [node for node in (argument(layer, 1, "weight"), argument(layer, 2, "bias")) if node is not None]
    tensors = [held(flat, node) for node in weights]
    if any(t is None or t.dtype is not mixing.dtype for t in tensors) or any(uses(flat, n) > 1 for n in weights):
        return False
    kept, made = u.meta.get("value"), layer.meta["value"]
    return (
        kept is not None
        and (kept.shape, kept.dtype) == (made.shape, mixing.dtype)
        and kept.shape[-1] == mixing.shape[0]
    )


def multiplied(
    flat: FlatGraph, gone: tuple[Any, ...], u: Any, scales: list[Any], mixing: Tensor, bias: Tensor | None
) -> Match | None:
    """The products of the weights, in float64 where the device has it; None where they are no numbers."""
    layer = gone[-1]
    own: Any = held(flat, argument(layer, 1, "weight"))
    wide = torch.float64 if own.device.type != "mps" else torch.float32
    scaled = mixing.to(wide)
    for scale in scales:
        scaled = scaled * (scale.to(wide) if isinstance(scale, Tensor) else scale)
    shift = None if bias is None else bias.to(wide)
    own_bias = held(flat, argument(layer, 2, "bias"))
    if own_bias is not None:
        moved = scaled @ own_bias.to(wide)
        shift = moved if shift is None else shift + moved
    weight = (scaled @ own.to(wide)).to(own.dtype)
    if not bool(weight.isfinite().all()):
        return None
    shift = None if shift is None else shift.to(own.dtype)
    return Match(gone=gone, u=u, weight=weight, bias=shift, mixing=mixing.detach())


def write_(flat: FlatGraph, match: Match, *, mixed: bool, compiled: bool) -> None:
    """Put the product in the place of what it stands for."""
    kept = match.u.meta["value"]
    if mixed:
        own = triton_runs_on(match.weight.device) and can_tile(*match.weight.shape)
        make = Writer.joined_in_half if compiled else Writer.in_one_kernel if own else Writer.in_half
    else:
        few = kept.numel() * kept.shape[-1] <= FEW
        make = Writer.apart if compiled else Writer.joined if few else Writer.in_place
    with flat.graph.inserting_before(match.gone[0]):
        made = make(Writer(flat, match))
    match.gone[0].replace_all_uses_with(made)
    for node in match.gone:
        flat.graph.erase_node(node)


class Writer:
    """Writes M u + (M s W2) h + shift into the graph, in one of six ways."""

    def __init__(self, flat: FlatGraph, match: Match) -> None:
        self.flat, self.match, self.u, self.width = flat, match, match.u, len(match.mixing)
        self.key = str(match.weight_node.target)
        self.trained = flat.get_parameter(self.key).requires_grad
        self.branch = match.mixing - eye_like(match.mixing)  # W = M - I, for where u itself is added in float32

    def joined(self) -> fx.Node:
        """linear([h, u], [M s W2, M]): as many operations as the layer and its sum."""
        return self.linear(self.beside(self.u), torch.cat((self.match.weight, self.match.mixing), 1))

    def apart(self) -> fx.Node:
        """linear(h, M s W2) + linear(u, M), for a compiler, which adds them where the result is used.

        Joined they are one product less, which does not pay on an H200.
        """
        mixed = self.flat.graph.call_function(F.linear, (self.u, self.kept("mixing", self.match.mixing)))
        return self.add(self.linear(self.match.h, self.match.weight), mixed)

    def in_place(self) -> fx.Node:
        """v.addmm_(u, M^T) on what the layer has just made; cast here, since autocast casts no such product."""
        v = self.call("type_as", self.linear(self.match.h, self.match.weight), self.u)
        mixing = self.call("type_as", self.kept("mixing", self.match.mixing.t()), self.u)
        return self.call("view_as", self.call("addmm_", self.rows(v), self.rows(self.u), mixing), self.u)

    def joined_in_half(self) -> fx.Node:
        """u + linear([h, u], [M s W2, W]), the product in half precision; a compiler writes u beside h."""
        both = self.beside(self.call("type_as", self.u, self.match.h))
        return self.add(self.u, self.linear(both, torch.cat((self.match.weight, self.branch), 1)))

    def in_one_kernel(self) -> fx.Node:
        """The same as `in_half`, the sum included, in a kernel of our own: as many launches as the layer alone."""
        weights = self.kept("absorbing", self.match.weight), self.kept("shift", self.match.bias)
        branch = self.kept("mixing", self.branch)
        for node in (weights[0], branch):
            node.meta["cast"] = True
        return self.flat.graph.call_function(linear_residual, (self.u, self.match.h, *weights, branch))

    def in_half(self) -> fx.Node:
        """u + (v + W u), the bracket in half precision, where a product takes a tenth of the time."""
        v = self.linear(self.match.h, self.match.weight)
        branch = self.kept("mixing", self.branch.t())
        branch.meta["cast"] = True  # autocast does not, as the product is in place
        product = self.call("addmm_", self.rows(v), self.rows(self.call("type_as", self.u, v)), branch)
        return self.add(self.u, self.call("view_as", product, self.u))

    def kept(self, role: str, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        name = f"{self.key}_{role}"
        self.flat.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=self.trained))
        return self.flat.graph.get_attr(name)

    def linear(self, h: Any, weight: Tensor) -> fx.Node:
        given = h, self.kept("absorbing", weight), self.kept("shift", self.match.bias)
        return self.flat.graph.call_function(F.linear, given)

    def beside(self, u: Any) -> fx.Node:
        """[h, u]"""
        last = self.u.meta["value"].dim() - 1
        return self.flat.graph.call_function(torch.cat, ((self.match.h, u), last))

    def add(self, one: Any, other: Any) -> fx.Node:
        return self.flat.graph.call_function(torch.add, (one, other))

    def call(self, method: str, *given: Any) -> fx.Node:
        return self.flat.graph.call_method(method, given)

    def rows(self, value: fx.Node) -> fx.Node:
        return self.call("reshape", value, -1, self.width)
