"""Deployed forms: small fx graphs of ordinary modules, which run without this package."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...blocks.anatomy import Anatomy


def residual(branch: nn.Module, activation: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """x + branch(x), and the activation after it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.add, (x, graph.call_module("branch", (x,))))
    modules: dict[str, nn.Module] = {"branch": branch}
    if isinstance(activation, nn.Module):
        modules["activation"] = copy.deepcopy(activation)
        total = graph.call_module("activation", (total,))
    elif activation is not None:
        total = graph.call_function(activation, (total,))
    graph.output(total)
    module = graph_of(modules, graph, "Residual")
    module.meta["residual"] = None if "activation" in modules else activation
    return module


def parts_of_residual(module: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor] | None] | None:
    """Branch and activation of a module that `residual` returned; None for any other."""
    if not isinstance(module, fx.GraphModule) or "residual" not in module.meta:
        return None
    return module.get_submodule("branch"), getattr(module, "activation", module.meta["residual"])


def gated_mlp(layers: Mapping[str, nn.Module], activation: nn.Module) -> nn.Module:
    """down(activation(gate(x)) * up(x))."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    gate = graph.call_module("activation", (graph.call_module("gate", (x,)),))
    product = graph.call_function(torch.mul, (gate, graph.call_module("up", (x,))))
    graph.output(graph.call_module("down", (product,)))
    return graph_of({**layers, "activation": activation}, graph, "GatedMLP")


def affine(scale: Tensor, shift: Tensor) -> nn.Module:
    """x * scale + shift."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.mul, (x, graph.get_attr("scale")))
    graph.output(graph.call_function(torch.add, (product, graph.get_attr("shift"))))
    root = nn.Module()
    root.scale = nn.Parameter(scale.clone())
    root.shift = nn.Parameter(shift.clone())
    return fx.GraphModule(root, graph, "Affine")


def as_block(module: nn.Module, anatomy: Anatomy) -> nn.Module:
    """Wrap a module of one tensor so that it is called, and returns, as the block."""
    if anatomy.kind in ("basic", "bottleneck") and anatomy.returns == "tensor":
        return module
    return called(module, anatomy.input, int(anatomy.returns == "tuple"))


def called(body: nn.Module, argument: str = "", length: int = 0) -> nn.Module:
    """A module that applies `body` to its first argument and ignores all others.

    With a `length` it returns a tuple of it: the output, then None.
    """
    graph = fx.Graph()
    x = graph.placeholder(argument or "x")
    graph.placeholder("*args")
    graph.placeholder("**kwargs")
    y: Any = graph.call_module("body", (x,))
    graph.output((y, *([None] * (length - 1))) if length else y)
    # copies of a GraphModule lose its hooks; copies of an ordinary module keep them
    ordinary = nn.Sequential(body) if isinstance(body, fx.GraphModule) else body
    return graph_of({"body": ordinary}, graph, "Block")


def graph_of(modules: Mapping[str, nn.Module], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A GraphModule of a graph that calls these modules by name."""
    root = nn.Module()
    for key, module in modules.items():
        root.add_module(key, module)
    return fx.GraphModule(root, graph, name)


def as_module(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the module, or one that calls the function."""
    if isinstance(function, nn.Module):
        return copy.deepcopy(function)
    if function in (torch.relu, F.relu):
        return nn.ReLU()
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return graph_of({}, graph, "Function")
