"""A whole model as one flat graph of operations, without module calls, dropout and shape checks.

In eager mode a small batch waits for Python, which spends much of its time between operations: in module calls, in
dropout of eval mode, in checks of shapes. A flat graph calls one operation after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..blocks.running import PrivateRandom, unchanged
from ..blocks.tracing import ModelTracer
from ..errors import ReplearnError, class_and_line
from .graph_module import FlatGraph, with_short_names
from .verify import rebuilt, run_on_example

DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
OURS = ("torch", "_operator", "math", "builtins", "replearn")  # others may have side effects
LAYERS = (F.linear, torch.conv1d, F.conv1d, torch.conv2d, F.conv2d, torch.conv3d, F.conv3d)


def flatten(model: nn.Module, example: Any) -> FlatGraph:
    """The model as one flat graph that takes the arguments of the example, with any batch size.

    It shares the model's tensors. Raises ReplearnError for a model with hooks, and for one that can't be traced.
    """
    refuse_unfit(model, example)
    graph = graph_of(model, example)
    if isinstance(graph, str):
        raise ReplearnError(
            f"{type(model).__name__} can't be flattened: torch.fx can't trace its code ({graph}), as where its "
            "way depends on values, or on arguments taken as *args or **kwargs. Leave flatten off."
        )
    return graph


def graph_of(model: nn.Module, example: Any) -> FlatGraph | str:
    """The flat graph, or why there is none."""
    try:
        given = given_to(model, example)
        tracer = ModelTracer(given)
        with PrivateRandom():
            graph = tracer.trace(model)
        traced = fx.GraphModule(held_by(model, tracer.root, graph), graph)
    except Exception as error:
        return class_and_line(error)
    drop_checks_(traced.graph)
    drop_idle_(traced.graph)
    call_builtins_(traced.graph)
    drop_dead_(traced.graph)
    drop_left_out_(traced.graph, given)
    for node in traced.graph.find_nodes(op="placeholder"):
        if str(node.target).startswith("*"):
            return f"it uses {node.target}"
    return with_short_names(traced, type(model).__name__)


def held_by(model: nn.Module, traced: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """The graph's targets: modules and tensors of the model, and constants that the trace stored on its copy."""
    targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    return {name: attrgetter(name)(traced if name in vars(traced) else model) for name in targets}


def given_to(model: nn.Module, example: Any) -> dict[str, Any]:
    """The example's values by the names of the arguments that take them."""
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    args = args if isinstance(args, tuple) else (args,)
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def refuse_unfit(model: nn.Module, example: Any) -> None:
    if example is None:
        raise ReplearnError(
            "flatten=True needs an example of the model's input to compare the flat graph on: a tensor, a tuple "
            "of arguments or a dict of keywords, as in deploy(model, torch.randn(2, 3, 224, 224), flatten=True)."
        )
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise ReplearnError(
                f"{type(model).__name__} can't be flattened: {name or 'it'} has forward hooks, and a flat graph "
                "calls no modules that could run them. Remove them, or leave flatten off."
            )


def drop_checks_(graph: fx.Graph) -> None:
    """Remove torch._assert: for an input of a wrong shape an operation raises instead."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.target is torch._assert:
            graph.erase_node(node)


def drop_idle_(graph: fx.Graph) -> None:
    """Remove dropout, which does nothing in eval mode."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in DROPOUTS and argument(node, 2, "training") is False:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def call_builtins_(graph: fx.Graph) -> None:
    """Call torch's builtins in place of the Python functions around them, with a norm's arguments by position."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (F.layer_norm, torch.layer_norm):
            places = enumerate(("input", "normalized_shape", "weight", "bias", "eps"))
            given = [argument(node, place, name) for place, name in places]
            given[4:] = [] if given[4] is None else given[4:]
            node.target, node.args, node.kwargs = torch.layer_norm, tuple(given), {}
        elif node.op == "call_function" and node.target is F.relu:
            node.target = torch.relu_ if argument(node, 1, "inplace") else torch.relu
            node.args, node.kwargs = (argument(node, 0, "input"),), {}


def drop_dead_(graph: fx.Graph) -> None:
    """Remove dead code; a node that writes in place is not dead."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or writes_in_place(node))


def drop_left_out_(graph: fx.Graph, given: Collection[str]) -> None:
    """Remove arguments that the example does not give: the graph has their defaults as constants."""
    for node in graph.find_nodes(op="placeholder"):
        starred = str(node.target).startswith("*") and not node.users
        if (node.args or starred) and str(node.target).lstrip("*") not in given:
            graph.erase_node(node)


def writes_in_place(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (
        any(value is True for value in (node.kwargs.get("inplace"), *node.args[1:]))
        or "out" in node.kwargs
        or (name.endswith("_") and not name.endswith("__"))
        or (not node.users and (getattr(node.target, "__module__", None) or "torch").split(".")[0] not in OURS)
    )


def note_values_(flat: FlatGraph, example: Any, dtype: torch.dtype | None) -> None:
    """Run the graph on the example, and store in each node's `meta["value"]` a meta tensor of its result."""
    run_on(example, NotingValues(flat, dtype), flat, dtype)


def run_on(example: Any, interpreter: fx.Interpreter, flat: FlatGraph, dtype: torch.dtype | None) -> Any:
    """Interpret the graph on a copy of the example, under autocast if there is a dtype; its outputs."""
    given = given_to(flat, rebuilt(example, Tensor.clone))  # the forward may write to it
    device = next((tensor.device.type for tensor in (*flat.parameters(), *flat.buffers())), "cpu")
    autocast = torch.autocast(device, dtype, enabled=dtype is not None)
    with unchanged(flat, private=True), run_on_example(flat), torch.no_grad(), autocast:
        return interpreter.run(*(given[str(node.target)] for node in flat.graph.find_nodes(op="placeholder")))


class NotingValues(fx.Interpreter):
    def __init__(self, flat: FlatGraph, dtype: torch.dtype | None) -> None:
        super().__init__(flat)
        self.dtype = dtype

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.meta.get("cast") is True and self.dtype is not None:
            made = made.to(self.dtype)  # as it will be stored
        if isinstance(made, Tensor):
            n.meta["value"] = torch.empty_like(made, device="meta")
        return made


def drop_unused_(flat: FlatGraph) -> None:
    """Remove dead nodes, and the weights that no node reads."""
    drop_dead_(flat.graph)
    read = {str(node.target) for node in flat.graph.nodes}
    for name, _ in list(flat.named_parameters(recurse=False)):
        if name not in read:
            delattr(flat, name)
    flat.graph.lint()
    flat.recompile()


@torch.no_grad()
def cast_weights_(flat: FlatGraph, dtype: torch.dtype) -> None:
    """Store in `dtype` the weights that only layers read for which autocast would cast them at every call."""
    for name, parameter in list(flat.named_parameters(recurse=False)):
        nodes = [node for node in flat.graph.find_nodes(op="get_attr") if node.target == name]
        if parameter.dtype is torch.float32 and all(_is_cast(node) for node in nodes):
            setattr(flat, name, nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad))


def _is_cast(node: fx.Node) -> bool:
    def by(user: fx.Node) -> bool:
        layer = user.op == "call_function" and user.target in LAYERS
        return layer and node in (argument(user, 1, "weight"), argument(user, 2, "bias"))

    return node.meta.get("cast") is True or all(by(user) for user in node.users)


def argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)
