"""Where a BatchNorm and a ReLU after it stand in a module's own code, and that code with one call for both.

The code is read off a trace, and written anew; layers are still found in the module when it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..tracing import OneForward, left_alone
from ..words import words_of
from .operation import FusedBatchNorm2d, normed, rectified

SUMS = (operator.add, operator.iadd, torch.add)
_ABSENT = object()


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A module's forward with fused norms in it, if there are any, and what of the module it was written for."""

    forward: Callable[..., Any] | None
    norms: int
    settings: dict[str, Any]
    children: list[tuple[str, type]]

    @classmethod
    def of(cls, module: nn.Module) -> Rewritten:
        words = words_of(module)
        settings = {name: vars(module).get(name, _ABSENT) for name in words if is_setting(module, name)}
        return cls(*forward_of(module), settings, children_of(module))

    def holds_for(self, module: nn.Module) -> bool:
        own = vars(module)
        same = all(own.get(name, _ABSENT) is value for name, value in self.settings.items())
        return same and self.children == children_of(module)


def is_setting(module: nn.Module, name: str) -> bool:
    """Whether a word in a module's code may be an attribute of it that the trace has taken for a constant."""
    return name not in module._modules and name not in module._parameters and name not in module._buffers


def children_of(module: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(child)) for name, child in module._modules.items()]


def forward_of(module: nn.Module) -> tuple[Callable[..., Any] | None, int]:
    """The module's forward, as a function of it, with norms and the ReLUs after them fused; and how many are."""
    graph = trace_own(module)
    norms = 0 if graph is None else fuse_(graph, module)
    if graph is None or not norms:
        return None, 0
    return type(fx.GraphModule(module, graph)).forward, norms


class OwnForward(OneForward):
    """Traces one module's own code; every submodule is a call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m is not self._top


def trace_own(module: nn.Module) -> fx.Graph | None:
    """None where the code has no fixed order of operations: it is then left as it is."""
    try:
        with left_alone(module), torch.random.fork_rng(devices=[]):
            return OwnForward(module).trace(module)
    except Exception:
        return None


def fuse_(graph: fx.Graph, module: nn.Module) -> int:
    """Put one call in the place of each norm, sum and ReLU, in place; returns how many there are."""
    found = 0
    for node in list(graph.nodes):
        if not is_relu(node, module):
            continue
        chain = chain_before(node, module)
        if chain is not None:
            write_(graph, node, *chain)
            found += 1
    return found


def chain_before(relu: fx.Node, module: nn.Module) -> tuple[fx.Node, fx.Node | None, list[fx.Node]] | None:
    """The norm whose result, alone or in a sum, goes into this ReLU and nowhere else; the other summand; all."""
    last, idle = skip_idle(relu.args[0], module)
    if is_only_use(last) and is_norm_call(last, module):
        return last, None, [*idle, last]
    if not is_sum(last) or not is_only_use(last) or any(node is not relu for node in between(last, relu, idle)):
        return None
    candidates = []
    for place, argument in enumerate(last.args):
        norm, more = skip_idle(argument, module)
        if is_norm_call(norm, module) and is_only_use(norm):
            candidates.append((norm, last.args[1 - place], [*idle, last, *more, norm]))
    order = {node: number for number, node in enumerate(relu.graph.nodes)}
    return max(candidates, key=lambda found: order[found[0]], default=None)


def between(first: fx.Node, last: fx.Node, idle: list[fx.Node]) -> list[fx.Node]:
    """What comes after one node up to another, other than layers that do nothing."""
    found, node = [], first.next
    while node is not last:
        if node not in idle:
            found.append(node)
        node = node.next
    return found


def skip_idle(node: Any, module: nn.Module) -> tuple[Any, list[fx.Node]]:
    """What a node is, before layers that do nothing, and those."""
    idle: list[fx.Node] = []
    while is_call_of(node, module, nn.Identity) and is_only_use(node):
        idle.append(node)
        node = node.args[0]
    return node, idle


def write_(graph: fx.Graph, relu: fx.Node, norm: fx.Node, other: fx.Node | None, chain: list[fx.Node]) -> None:
    with graph.inserting_before(relu):
        layer, around = graph.get_attr(str(norm.target)), () if other is None else (other,)
        if relu.op == "call_function":
            made = graph.call_function(rectified, (norm.args[0], layer, *around))
        else:
            made = graph.call_function(normed, (norm.args[0], layer, graph.get_attr(str(relu.target)), *around))
    relu.replace_all_uses_with(made)
    for node in (relu, *chain):
        graph.erase_node(node)


def is_relu(node: fx.Node, module: nn.Module) -> bool:
    return is_call_of(node, module, nn.ReLU) or (node.op == "call_function" and node.target is F.relu)


def is_norm_call(node: Any, module: nn.Module) -> bool:
    """Of a norm whose input nobody else sees, who might write to it before the ReLU."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or not takes_one(node):
        return False
    return is_norm(module.get_submodule(str(node.target))) and is_only_use(node.args[0])


def is_norm(module: nn.Module | None) -> bool:
    return type(module) in (nn.BatchNorm2d, FusedBatchNorm2d)


def is_sum(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.kwargs or len(node.args) != 2:
        return False
    named = node.op == "call_method" and node.target in ("add", "add_")
    known = named or (node.op == "call_function" and node.target in SUMS)
    return known and all(isinstance(argument, fx.Node) for argument in node.args)


def is_call_of(node: Any, module: nn.Module, kind: type[nn.Module]) -> bool:
    called = isinstance(node, fx.Node) and node.op == "call_module" and takes_one(node)
    return called and type(module.get_submodule(str(node.target))) is kind


def takes_one(node: fx.Node) -> bool:
    return len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def is_only_use(node: Any) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1
