"""Residual sums of a traced block, and the chain of modules between two of its values."""

from __future__ import annotations

from dataclasses import dataclass

from .trace import Call, Key, Node, Trace

VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "clone",
    "alias",
    "detach",
    "contiguous",
    "dropout",
    "unsqueeze",
    "squeeze",
}
ACTIVATIONS = ("relu", "gelu", "silu", "hardtanh", "hardswish", "elu", "leaky_relu", "tanh", "sigmoid")
NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")


@dataclass(frozen=True, slots=True)
class Sum:
    """A residual sum: stream plus branch."""

    key: Key
    index: int
    stream: int  # nodes
    branch: int
    attention: bool  # the branch mixes tokens


def residual_sums(found: Trace, index: int) -> tuple[Sum, ...]:
    """The sums on the way from the input to a value along which the input itself is passed on."""
    way = _stream(found, index)
    return tuple(way) if way is not None else ()


def _stream(found: Trace, index: int) -> list[Sum] | None:
    if index == 0:
        return []
    if index < 0:
        return None
    node = found.nodes[index]
    if node.name == "add" and len(node.inputs) == 2:
        for stream, branch in (node.inputs, node.inputs[::-1]):
            before = _stream(found, stream)
            if before is not None:
                own = ancestors(found, branch) - ancestors(found, stream)
                return [*before, Sum(node.key, index, stream, branch, any(mixes(found.nodes[i]) for i in own))]
        return None
    if len(node.inputs) == 1 and passes(node):
        return _stream(found, node.inputs[0])
    return None


def passes(node: Node) -> bool:
    return node.name in VIEWS or node.name in ACTIVATIONS or any(norm in node.name for norm in NORMS)


def mixes(node: Node) -> bool:
    return "softmax" in node.name or "attention" in node.name


def ancestors(found: Trace, index: int) -> set[int]:
    seen: set[int] = set()
    todo = [index]
    while todo:
        at = todo.pop()
        if at >= 0 and at not in seen:
            seen.add(at)
            todo += found.nodes[at].inputs
    return seen


def chain(found: Trace, begin: int, end: int) -> tuple[str, ...] | None:
    """The modules and functions that lead from one value to another, one after another; None where others do."""
    way: list[str] = []
    at = end
    while at != begin:
        if at < begin:
            return None
        calls = [call for call in found.calls if call.made == at and begin <= call.given < at]
        if calls:
            outer: Call = min(calls, key=lambda call: call.given)
            way.insert(0, outer.path)
            at = outer.given
            continue
        node = found.nodes[at]
        if len(node.inputs) != 1:
            return None
        if node.name == "relu":
            way.insert(0, "=relu")
        elif node.name == "gelu":
            way.insert(0, "=gelu")
        elif node.name == "silu":
            way.insert(0, "=silu")
        elif node.name not in VIEWS:
            return None
        at = node.inputs[0]
    return tuple(way)


def after_sum(found: Trace, index: int | None) -> tuple[str, ...] | None:
    return None if index is None or found.output < 0 else chain(found, index, found.output)
