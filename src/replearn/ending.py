"""How a block ends: is its result u + v, with v from one Linear and nothing else on the way?

The proof is a trace of the block's code, and of the code of the modules that v passes: each of them gives back
what it takes (in eval mode: dropout, drop path), scales its channels (LayerScale), or ends in that Linear itself.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .folding import reaches, words_of
from .tracing import certain_trace


@dataclass(frozen=True, eq=False, kw_only=True)
class Reached:
    """Where v comes from: the Linear's path, or "" for the input; the node that gave it, and what came after."""

    linear: str
    node: fx.Node
    passed: tuple[str, ...] = ()  # modules
    scales: tuple[Tensor | float, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Ending:
    """A block's graph, and in it the sum u + v that it returns; v is what `source` gives, times the scales."""

    graph: fx.Graph
    total: fx.Node
    stream: fx.Node  # u
    source: fx.Node
    linear: str  # the path of the Linear below the block
    passed: tuple[str, ...]  # the modules between that Linear and the sum
    scales: tuple[Tensor | float, ...] = field(repr=False)


def ending_of(block: nn.Module) -> Ending | str:
    """The sum that a block ends in, or why it has none that another map can be taken up into."""
    graph = certain_trace(block)
    if isinstance(graph, str):
        return graph
    total = _result(graph)
    if total is None or not _is_sum(total) or len(total.users) != 1:
        return "what it returns is no sum"
    reasons = []
    terms: Any = total.args
    for stream, added in (terms, terms[::-1]):
        found = _follow(block, graph, added)
        if isinstance(found, Reached) and found.linear:
            if stream is added:
                return "both terms of its sum come from one layer"
            reason = _unsafe(block, found.linear, graph)
            return reason or Ending(
                graph=graph,
                total=total,
                stream=stream,
                source=found.node,
                linear=found.linear,
                passed=found.passed,
                scales=found.scales,
            )
        reasons.append(found if isinstance(found, str) else "its own input is added")
    return f"neither term of its sum comes from one Linear: {reasons[1]}; {reasons[0]}"


def _result(graph: fx.Graph) -> fx.Node | None:
    (returned,) = next(node for node in graph.nodes if node.op == "output").args
    if isinstance(returned, tuple) and len(returned) == 1:
        (returned,) = returned
    return returned if isinstance(returned, fx.Node) else None


def _is_sum(node: fx.Node) -> bool:
    known = {"call_function": (operator.add, torch.add), "call_method": ("add",)}
    terms = node.args if node.target in known.get(node.op, ()) and not node.kwargs else ()
    return len(terms) == 2 and all(isinstance(term, fx.Node) for term in terms)


def _follow(module: nn.Module, graph: fx.Graph, node: Any) -> Reached | str:
    """Go back from a value to the Linear that made it, or to the module's first argument."""
    scales: tuple[Tensor | float, ...] = ()
    passed: tuple[str, ...] = ()
    first = next(node for node in graph.nodes)
    while node is not first:
        if len(node.users) != 1:
            return f"{node.name} is used elsewhere too"
        if _is_idle_dropout(node):
            node = node.args[0]
        elif (scaled := _scaled(module, node)) is not None:
            node, scales = scaled[0], (*scales, scaled[1])
        elif node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
            part, name = module.get_submodule(str(node.target)), str(node.target)
            found = _reached(part, node)
            if isinstance(found, str):
                return found
            if _is_linear(part) or found.linear:
                if sum(other.target == name for other in graph.nodes) != 1:
                    return f"{name} is called more than once"
                if found.scales:
                    return f"{name} scales what its Linear gives"
                path = name if _is_linear(part) else f"{name}.{found.linear}"
                inside = tuple(f"{name}.{other}" for other in found.passed)
                return Reached(linear=path, node=node, scales=scales, passed=(*passed, *inside))
            node, scales, passed = node.args[0], (*scales, *found.scales), (*passed, name)
        else:
            return f"{node.name} ({node.op}) lies on the way"
    return Reached(linear="", node=node, scales=scales, passed=passed)


def _reached(part: nn.Module, call: fx.Node) -> Reached | str:
    """Where the result of one submodule comes from."""
    if _is_linear(part):
        return Reached(linear="", node=call)
    inner = certain_trace(part)
    if isinstance(inner, str):
        return inner
    result = _result(inner)
    if result is None:
        return f"{call.target} returns no tensor"
    found = _follow(part, inner, result)
    if isinstance(found, Reached) and found.linear and (reason := _unsafe(part, found.linear, inner)):
        return reason
    return replace(found, node=call) if isinstance(found, Reached) else f"{found} in {call.target}"


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _is_idle_dropout(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not F.dropout or not isinstance(node.args[0], fx.Node):
        return False
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return training is False


def _scaled(module: nn.Module, node: fx.Node) -> tuple[fx.Node, Tensor | float] | None:
    """The value and the factor, where a node multiplies channels by a stored vector, or all by a number."""
    known = {"call_function": (operator.mul, torch.mul), "call_method": ("mul", "mul_")}
    if node.target not in known.get(node.op, ()) or len(node.args) != 2 or node.kwargs:
        return None
    for value, factor in (node.args, node.args[::-1]):
        if not isinstance(value, fx.Node) or value.op == "get_attr":
            continue
        if isinstance(factor, (int, float)):
            return value, float(factor)
        if isinstance(factor, fx.Node) and factor.op == "get_attr":
            stored = operator.attrgetter(str(factor.target))(module)
            if isinstance(stored, Tensor) and stored.dim() <= 1:
                return value, stored
    return None


def _unsafe(owner: nn.Module, path: str, graph: fx.Graph) -> str | None:
    """Why the Linear's weights can't be others, as far as its owner's code goes."""
    if reaches(graph, path, called=True):
        return f"the weights of {path} are read by other code too"
    holder = owner.get_submodule(path.rpartition(".")[0])
    linear: Any = owner.get_submodule(path)
    if linear.bias is None and "bias" in words_of(holder):
        return f"{path} has no bias, and its owner's code asks for one"
    return None
