"""Fold an operator's linear map into the linear layer before it, under autocast.

    y  = u + v,  v = s (W2 h + b2)          how a transformer's block ends, s being its LayerScale
    y' = y + W y + c                        the operator: M = W + I
       = u + (M s W2) h + (M s b2 + c) + W u

u stays in float32 and the products are in half precision. It needs a flat graph, which shows all users of a value
and of a weight. Exact up to rounding.
"""

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

ABSORBED = "absorbed"  # key of the graph's `meta`: which operators, into which layers
PRODUCTS = {"call_function": (operator.mul, torch.mul), "call_method": ("mul", "mul_")}


@dataclass(frozen=True, eq=False, kw_only=True)
class Match:
    """The nodes of the formula, from its result back to the layer, and its new weights."""

    gone: tuple[Any, ...]  # the nodes that are replaced; the layer is the last
    u: Any
    weight: Tensor = field(repr=False)  # M s W2
    bias: Tensor | None = field(repr=False)  # M s b2 + c
    branch: Tensor = field(repr=False)  # W

    @property
    def h(self) -> Any:
        return argument(self.gone[-1], 0, "input")

    @property
    def weight_node(self) -> Any:
        return argument(self.gone[-1], 1, "weight")


def absorb_(
    flat: FlatGraph, operators: Collection[str], example: Any, dtype: torch.dtype | None, *, compiled: bool = False
) -> FlatGraph:
    """Fold the named operators into the layers before them, in place, where the graph has the formula.

    `dtype` is that of the autocast which the graph will run under. With `compiled` no kernel of ours is used.
    """
    note_values_(flat, example, dtype)
    absorbed = []
    for node in flat.graph.find_nodes(op="call_function", target=F.linear):
        path = path_of(argument(node, 1, "weight"))
        name = next((name for name in operators if path.startswith(f"{name}.")), None)
        match = None if name is None else match_of(flat, node)
        if match is not None:
            absorbed.append(f"{name} -> {path_of(match.weight_node).rpartition('.')[0]}")
            rewrite_(flat, match, compiled)
    drop_unused_(flat)
    flat.meta[ABSORBED] = tuple(absorbed)
    return flat


def path_of(node: Any) -> str:
    return str(node.meta.get(PATH, "")) if isinstance(node, fx.Node) else ""


@torch.no_grad()
def match_of(flat: FlatGraph, linear: Any) -> Match | None:
    """The formula that ends in this linear map, if it is there and nothing else uses the values that change."""
    y, branch = argument(linear, 0, "input"), held(flat, argument(linear, 1, "weight"))
    if not is_sum(y) or branch is None or len(linear.users) != 1:
        return None
    (total,) = linear.users
    if set(y.users) != {linear, total} or not is_sum(total):
        return None
    for u, v in (y.args, y.args[::-1]):
        path, scales = path_to_layer(flat, v)
        if path and u is not v and can_absorb(flat, u, path[-1], branch):
            bias = held(flat, argument(linear, 2, "bias"))
            return multiplied(flat, (total, linear, y, *path), u, scales, branch, bias)
    return None


def path_to_layer(flat: FlatGraph, v: Any) -> tuple[list[Any], list[Any]]:
    """The nodes from a term of a sum back to its linear layer, and the scales between; empty without a layer."""
    path, scales = [v], []
    while len(v.users) == 1 and v.target is not F.linear:
        factors = [factor(flat, value) for value in v.args] if v.target in PRODUCTS.get(v.op, ()) else []
        if len(factors) != 2 or factors.count(None) != 1:
            return [], []
        place = factors.index(None)
        scales.append(factors[1 - place])
        v = v.args[place]
        path.append(v)
    return (path, scales) if len(v.users) == 1 else ([], [])


def factor(flat: FlatGraph, value: Any) -> Tensor | float | None:
    """A number, or a stored tensor with one for each channel; None for any other value."""
    if isinstance(value, (int, float)):
        return value
    stored = held(flat, value)
    return stored if stored is not None and stored.dim() <= 1 else None


def can_absorb(flat: FlatGraph, u: Any, layer: Any, branch: Tensor) -> bool:
    """True if shapes and dtypes agree and nothing else uses the layer's weights."""
    weights = [node for node in (argument(layer, 1, "weight"), argument(layer, 2, "bias")) if node is not None]
    tensors = [held(flat, node) for node in weights]
    if any(t is None or t.dtype is not branch.dtype for t in tensors) or any(uses(flat, n) > 1 for n in weights):
        return False
    kept, made = u.meta.get("value"), layer.meta["value"]
    return (
        kept is not None
        and (kept.shape, kept.dtype) == (made.shape, branch.dtype)
        and kept.shape[-1] == branch.shape[0]
    )


def multiplied(
    flat: FlatGraph, gone: tuple[Any, ...], u: Any, scales: list[Any], branch: Tensor, bias: Tensor | None
) -> Match | None:
    """The new weights, computed in float64 where the device has it; None if they are not finite."""
    layer = gone[-1]
    own: Any = held(flat, argument(layer, 1, "weight"))
    wide = torch.float64 if own.device.type != "mps" else torch.float32
    scaled = branch.to(wide) + torch.eye(len(branch), dtype=wide, device=branch.device)
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
    return Match(gone=gone, u=u, weight=weight, bias=shift, branch=branch.detach())


def rewrite_(flat: FlatGraph, match: Match, compiled: bool) -> None:
    """Replace the matched nodes by u + ((M s W2) h + shift + W u), in one kernel where it applies."""
    graph, key = flat.graph, str(match.weight_node.target)
    trained = flat.get_parameter(key).requires_grad

    def stored(role: str, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        name = f"{key}_{role}"
        flat.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=trained))
        return graph.get_attr(name)

    with graph.inserting_before(match.gone[0]):
        weight, bias = stored("absorbing", match.weight), stored("shift", match.bias)
        branch = stored("mixing", match.branch)
        if not compiled and triton_runs_on(match.weight.device) and can_tile(*match.weight.shape):
            for node in (weight, branch):
                node.meta["cast"] = True
            made = graph.call_function(linear_residual, (match.u, match.h, weight, bias, branch))
        else:
            made = match.u
            for given in ((match.h, weight, bias), (match.u, branch)):
                made = graph.call_function(torch.add, (made, graph.call_function(F.linear, given)))
    match.gone[0].replace_all_uses_with(made)
    for node in match.gone:
        graph.erase_node(node)
