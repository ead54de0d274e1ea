"""Take an operator's linear map up into the linear layer before it, where it costs no operation of its own.

    y  = u + v,  v = s (W2 h + b2)          how a transformer's block ends, s being its LayerScale
    y' = M y + c                            the operator: M = W + I
       = M u + (M s W2) h + (M s b2 + c)    one product in place of the sum

In a flat graph nothing is hidden: who uses a value, and what a weight goes into, can be read off it. Exact but for
rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..fast.graph_module import PATH, FlatGraph, held, is_sum, uses
from ..fast.inlining import argument, drop_unused_, note_values_
from .absorbed import Match, write_

ABSORBED = "absorbed"  # in the graph's `meta`: which operators, into which layers
PRODUCTS = {"call_function": (operator.mul, torch.mul), "call_method": ("mul", "mul_")}


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
        mixing, gone = mixing + torch.eye(len(mixing), dtype=mixing.dtype, device=mixing.device), (total, linear)
    for u, v in (y.args, y.args[::-1]):
        way, scales = way_to_layer(flat, v)
        if way and u is not v and fits(flat, u, way[-1], mixing):
            bias = held(flat, argument(linear, 2, "bias"))
            return multiplied(flat, (*gone, y, *way), u, scales, mixing, bias)
    return None


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


def path_of(node: Any) -> str:
    return str(node.meta.get(PATH, "")) if isinstance(node, fx.Node) else ""
