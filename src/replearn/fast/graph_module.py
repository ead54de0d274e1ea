"""A GraphModule with all weights on itself, which it reads without attribute lookups."""

from __future__ import annotations

import operator
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

SUMS = {"call_function": (operator.add, torch.add), "call_method": ("add",)}
PATH = "path"  # key of a node's `meta`: the name of the weight in the model
READ = re.compile(r"^(\w+) = self\.(\w+)$", re.MULTILINE)


class FlatGraph(fx.GraphModule):
    """Its code reads weights from `self._parameters`: attribute lookups would take a seventh of a run.

    It is pickled as a GraphModule, and needs nothing of this package except the kernels that a graph made on a GPU
    calls.
    """

    def recompile(self) -> Any:
        self.graph.on_generate_code(lambda _: partial(read_from_dict, set(self._parameters)))
        return super().recompile()

    def __reduce__(self) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return fx.GraphModule(self, graph, type(self).__name__).train(self.training).__reduce__()


def read_from_dict(names: set[str], lines: list[str]) -> list[str]:
    def short(found: re.Match[str]) -> str:
        return f"{found[1]} = weights[{found[2]!r}]" if found[2] in names else found[0]

    return ["weights = self._parameters\n", *(READ.sub(short, line) for line in lines)]


def with_short_names(traced: fx.GraphModule, name: str) -> FlatGraph:
    """The same graph on a module with each weight as its own attribute."""
    root, graph = nn.Module(), fx.Graph()  # a new graph: the old one refers to the tracer, which can't be pickled
    held: dict[int, str] = {}

    def held_as(target: str) -> str:
        value = operator.attrgetter(target)(traced)
        if id(value) not in held:
            key = target.replace(".", "_")
            while hasattr(root, key):
                key += "_"
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                root.register_buffer(key, value)
            else:
                setattr(root, key, value)
            held[id(value)] = key
        return held[id(value)]

    copies: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].type = None
        if node.op in ("get_attr", "call_module"):
            copies[node].target = held_as(str(node.target))
            copies[node].meta[PATH] = str(node.target)
    graph.lint()
    return FlatGraph(root, graph, name).eval()


def is_sum(node: Any) -> bool:
    known = isinstance(node, fx.Node) and node.target in SUMS.get(node.op, ())
    return known and len(node.args) == 2 and not node.kwargs and all(isinstance(n, fx.Node) for n in node.args)


def held(flat: FlatGraph, node: Any) -> Tensor | None:
    """The tensor that a get_attr node reads; None for other nodes."""
    found = getattr(flat, str(node.target), None) if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return found if isinstance(found, Tensor) else None


def uses(flat: FlatGraph, node: fx.Node) -> int:
    same = [other for other in flat.graph.find_nodes(op="get_attr") if other.target == node.target]
    return sum(len(other.users) for other in same)
