"""Take an operator's linear map up into the block before it, where it then costs no launch of its own.

    y  = u + v,  v = s (W2 h + b2)          how that block ends, s being its LayerScale
    y' = M y + c                            the operator, its sum merged: M = W + I
       = M u + (M s W2) h + (M s b2 + c)    one product in place of the sum; the last Linear has other weights

Exact but for rounding. It is proven first that the block ends so (`ending.py`), and that nobody else would see
another value than before (`surroundings.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .anatomy import Anatomy
from .ending import Ending, ending_of
from .mixed_precision import stream_sum
from .operators.base import Operator, labels_of
from .recording import record_stand_in
from .surgery import set_submodule
from .surroundings import Surroundings

WIDEST = 1024  # under autocast: beyond this a map is seldom bound by launches, and its copy in float32 is large
Summing = Callable[[fx.Graph, fx.Node, fx.Node, int], fx.Node]


@dataclass(frozen=True, eq=False, kw_only=True)
class Absorption:
    """A block that takes an operator up: how it ends, and the weights that it will have."""

    block: str
    ending: Ending
    weight: Tensor = field(repr=False)  # of the last Linear
    bias: Tensor | None = field(repr=False)
    stream: Tensor = field(repr=False)  # M transposed

    @property
    def linear(self) -> str:
        return f"{self.block}.{self.ending.linear}"


@torch.no_grad()
def absorption_of(
    around: Surroundings, name: str, previous: str, anatomy: Anatomy, layer: nn.Module
) -> Absorption | str:
    """How the block `previous` can take up the map `layer` of the operator `name`, or why it can't."""
    block = around.modules.get(previous)
    if block is None or isinstance(block, Operator):
        return f"no kept block {previous} stands before it"
    ending = ending_of(block)
    if isinstance(ending, str):
        return f"{previous}: {ending}"
    reason = around.objection(name, previous, anatomy, ending)
    reason = reason or _differs(block, ending, layer) or _not_by_rows(block, ending)
    if reason:
        return f"{previous}: {reason}"
    made = _multiplied(previous, block, ending, layer)
    finite = all(bool(t.isfinite().all()) for t in (made.weight, made.stream) if not t.is_meta)
    return made if finite else f"{previous}: the product of the two weights is inf or NaN"


def _differs(block: nn.Module, ending: Ending, layer: Any) -> str | None:
    linear: Any = block.get_submodule(ending.linear)
    if linear.out_features != layer.in_features:
        return f"{ending.linear} gives {linear.out_features} features, and the operator takes {layer.in_features}"
    if (linear.weight.dtype, linear.weight.device) != (layer.weight.dtype, layer.weight.device):
        return f"{ending.linear} is {linear.weight.dtype} on {linear.weight.device}, and the operator is not"
    if any(isinstance(scale, Tensor) and scale.numel() not in (1, linear.out_features) for scale in ending.scales):
        return "it scales something else than channels"
    return None


def _not_by_rows(block: nn.Module, ending: Ending) -> str | None:
    """Is v computed from u alone, and of u's shape? Tried on a few rows of zeros."""
    graph = fx.Graph()
    copies = {ending.stream: graph.placeholder("u")}
    wanted = _ancestors(ending.source, ending.stream)
    for node in ending.graph.nodes:
        if node in wanted:
            if node.op == "placeholder":
                return f"what it adds is computed from {node.target} too"
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[ending.source])
    linear: Any = block.get_submodule(ending.linear)
    rows = linear.weight.new_zeros(2, 3, linear.out_features)
    try:
        shape = fx.GraphModule(block, graph)(rows).shape
    except RuntimeError as error:
        return f"what it adds is not computed token by token ({str(error).splitlines()[0]})"
    return None if shape == rows.shape else f"what it adds has the shape {tuple(shape)}, not that of x"


def _ancestors(node: fx.Node, stop: fx.Node) -> set[fx.Node]:
    found, open_ = {node}, [node]
    while open_:
        fresh = [other for other in open_.pop().all_input_nodes if other not in found and other is not stop]
        found.update(fresh)
        open_ += fresh
    return found


def _multiplied(name: str, block: nn.Module, ending: Ending, layer: Any) -> Absorption:
    """The product of the two maps, in float64 where the device has it."""
    linear: Any = block.get_submodule(ending.linear)
    wide = torch.float64 if linear.weight.device.type != "mps" else torch.float32
    mixed = layer.weight.to(wide)
    scaled = mixed
    for scale in ending.scales:
        scaled = scaled * (scale.to(wide) if isinstance(scale, Tensor) else scale)
    shift = None if layer.bias is None else layer.bias.to(wide)
    if linear.bias is not None:
        moved = scaled @ linear.bias.to(wide)
        shift = moved if shift is None else shift + moved
    dtype = linear.weight.dtype
    return Absorption(
        block=name,
        ending=ending,
        weight=(scaled @ linear.weight.to(wide)).to(dtype),
        bias=None if shift is None else shift.to(dtype),
        stream=layer.weight.detach().t().contiguous(),
    )


@torch.no_grad()
def absorb_(model: nn.Module, absorption: Absorption, dtype: torch.dtype | None) -> None:
    """Exchange the block for one that does the operator's work too, in place; `dtype` is that of autocast."""
    block = model.get_submodule(absorption.block)
    linear: Any = block.get_submodule(absorption.ending.linear)
    trained = linear.weight.requires_grad
    linear.weight = nn.Parameter(absorption.weight, requires_grad=trained)
    if absorption.bias is not None:
        linear.bias = nn.Parameter(absorption.bias, requires_grad=trained)
    stream = absorption.stream
    block.register_parameter("stream_weight", nn.Parameter(stream, requires_grad=trained))
    if dtype is not None:
        low = (stream - torch.eye(len(stream), dtype=stream.dtype, device=stream.device)).to(dtype)
        block.register_parameter("stream_branch", nn.Parameter(low, requires_grad=trained))
    made = _rewritten(block, absorption.ending, _in_place if dtype is None else _in_mixed_precision)
    for label, value in labels_of(block).items():
        if not hasattr(made, label):
            setattr(made, label, value)
    set_submodule(model, absorption.block, made)
    record_stand_in(model, block, made)


def _rewritten(block: nn.Module, ending: Ending, summed: Summing) -> fx.GraphModule:
    """The block's own graph with another sum of u and v."""
    graph = fx.Graph()  # a new one: the old names the tracer, which whoever unpickles it may not have
    copies: dict[fx.Node, fx.Node] = {}
    gone = _between(ending)
    linear: Any = block.get_submodule(ending.linear)
    for node in ending.graph.nodes:
        if node in gone:
            continue
        if node is ending.total:
            copies[node] = summed(graph, copies[ending.stream], copies[ending.source], linear.out_features)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: copies[n]))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].type = None
    graph.lint()
    return fx.GraphModule(block, graph, type(block).__name__)


def _in_place(graph: fx.Graph, u: fx.Node, v: fx.Node, width: int) -> fx.Node:
    """v.addmm_(u, M^T): on what the Linear has just made and nobody else has seen; a new tensor costs CUDA a copy.

    The casts do nothing but under a user's autocast, which leaves in-place products alone: v follows u there.
    """
    weight = graph.call_method("type_as", (graph.get_attr("stream_weight"), u))
    rows = graph.call_method("reshape", (graph.call_method("type_as", (v, u)), -1, width))
    product = graph.call_method("addmm_", (rows, graph.call_method("reshape", (u, -1, width)), weight))
    return graph.call_method("view_as", (product, u))


def _in_mixed_precision(graph: fx.Graph, u: fx.Node, v: fx.Node, width: int) -> fx.Node:
    weights = graph.get_attr("stream_weight"), graph.get_attr("stream_branch")
    return graph.call_function(stream_sum, (u, v, *weights))


def _between(ending: Ending) -> set[fx.Node]:
    """What lies between v's Linear and the sum, each with one user: it did nothing, or is in the weight now."""
    found: set[fx.Node] = set()
    (node,) = ending.source.users
    while node is not ending.total:
        found.add(node)
        (node,) = node.users
    return found | {n for n in ending.graph.nodes if n.op == "get_attr" and n.users and set(n.users) <= found}
