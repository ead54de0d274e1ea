"""Trace a block: the operations of one run as a graph, and the residual sums in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..fitting.observe import first
from .activations import Arguments, OpKey, unfused_attention

WEIGHT_VIEWS = {
    *("t", "transpose", "view", "_unsafe_view", "reshape", "permute"),
    *("detach", "alias", "expand", "_to_copy", "unsqueeze"),
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation, with the nodes, parameters and buffers that it reads."""

    index: int
    name: str  # without the underscore of in-place forms
    key: OpKey
    inputs: tuple[int, ...]
    tensors: tuple[str, ...]  # names of parameters and buffers below the block
    args: tuple[int, ...]  # the index of each input among the positional arguments
    dims: tuple[int, ...] = ()  # of a permutation
    shape: tuple[int, ...] = ()  # of its first result


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module inside the block: the nodes of its input (-1 for several inputs) and its output."""

    path: str
    input: int
    output: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The graph of one run of a block; node 0 is its input."""

    nodes: tuple[Node, ...]
    calls: tuple[ModuleCall, ...]
    output: int
    shape: tuple[int, ...] = ()  # of the output
    length: int = 0  # of the tuple that the block returns; 0 if it returns a tensor

    def users(self, index: int) -> list[Node]:
        return [node for node in self.nodes if index in node.inputs]


def trace_block(block: nn.Module, arguments: Arguments) -> Trace:
    """Run a block and record its operations; raises what its code raises."""
    recorder = _Recorder(block)
    own = arguments.with_input(arguments.x.clone())
    recorder.set_input(own.x)
    with unfused_attention(), recorder.module_hooks(), torch.no_grad(), recorder:
        output = block(*own.args, **own.kwargs)
    y = first(output)
    return Trace(
        tuple(recorder.nodes),
        tuple(recorder.calls),
        recorder.node_of(y),
        tuple(y.shape) if isinstance(y, Tensor) else (),
        len(output) if isinstance(output, (tuple, list)) else 0,
    )


class _Recorder(TorchDispatchMode):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block = block
        self.nodes: list[Node] = []
        self.calls: list[ModuleCall] = []
        self._counts: Counter[str] = Counter()
        self._indices: dict[int, int] = {}  # id of a tensor: the node with its value
        self._weight_names: dict[int, str] = {}  # id of a parameter or of a view: the parameter's name
        self._alive: list[Any] = []  # keeps tensors alive, so that ids stay unique
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            self._weight_names[id(tensor)] = name

    def set_input(self, x: Tensor) -> None:
        self._alive.append(x)
        self._indices[id(x)] = 0
        self.nodes.append(Node(0, "input", ("input", 0), (), (), ()))

    def node_of(self, value: Any) -> int:
        return self._indices.get(id(value), -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._record(func.overloadpacket.__name__, args, kwargs or {}, output)
        return output

    def _record(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        key = (name, self._counts[name])
        self._counts[name] += 1
        inputs = [(i, leaf) for i, arg in enumerate(args) for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)]
        inputs += [(-1, leaf) for leaf in tree_leaves(kwargs) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._alive += [leaf for _, leaf in inputs] + results
        node_args = [(arg, self._indices[id(leaf)]) for arg, leaf in inputs if id(leaf) in self._indices]
        tensors = tuple(self._weight_names[id(leaf)] for _, leaf in inputs if id(leaf) in self._weight_names)
        if not node_args:  # reads parameters alone
            if name in WEIGHT_VIEWS and len(tensors) == 1:
                self._weight_names.update({id(leaf): tensors[0] for leaf in results})
            return
        index = len(self.nodes)
        dims = tuple(args[1]) if name == "permute" else ()
        if name == "transpose":
            order = list(range(args[0].dim()))
            order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
            dims = tuple(order)
        nodes, args = tuple(node for _, node in node_args), tuple(arg for arg, _ in node_args)
        shape = tuple(results[0].shape) if results else ()
        self.nodes.append(Node(index, name.rstrip("_"), key, nodes, tensors, args, dims, shape))
        self._indices.update({id(leaf): index for leaf in results})

    @contextmanager
    def module_hooks(self) -> Iterator[None]:
        """Inside, hooks record the calls of every module in the block."""
        open_calls: list[int] = []

        def before_module(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = (*args, *kwargs.values())
            self._alive.append(inputs)
            open_calls.append(self.node_of(inputs[0]) if len(inputs) == 1 else -1)

        def after_module(path: str, module: nn.Module, args: Any, output: Any) -> None:
            self._alive.append(output)
            self.calls.append(ModuleCall(path, open_calls.pop(), self.node_of(first(output))))

        with ExitStack() as hooks:
            for path, module in self.block.named_modules():
                if path:
                    hooks.enter_context(module.register_forward_pre_hook(before_module, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(partial(after_module, path)))
            yield


VIEWS = {
    *("view", "_unsafe_view", "reshape", "clone", "alias"),
    *("detach", "contiguous", "dropout", "unsqueeze", "squeeze"),
}
ACTIVATIONS = ("relu", "gelu", "silu", "hardtanh", "hardswish", "elu", "leaky_relu", "tanh", "sigmoid")
FUNCTIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}  # written "=relu" in a chain
NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")


@dataclass(frozen=True, slots=True)
class Sum:
    """A residual sum: stream plus branch."""

    key: OpKey
    index: int
    stream: int  # the node of the residual stream
    branch: int  # the node of the branch
    attention: bool  # the branch mixes tokens


def residual_sums(trace: Trace, index: int) -> tuple[Sum, ...] | None:
    """The residual sums between the block's input and a node; None if no residual stream leads there."""
    if index <= 0:
        return () if index == 0 else None
    node = trace.nodes[index]
    if node.name == "add" and len(node.inputs) == 2:
        for stream, branch in (node.inputs, node.inputs[::-1]):
            before = residual_sums(trace, stream)
            if before is not None:
                own = ancestors(trace, branch) - ancestors(trace, stream)
                mixing = any(mixes_tokens(trace.nodes[i]) for i in own)
                return (*before, Sum(node.key, index, stream, branch, mixing))
        return None
    return residual_sums(trace, node.inputs[0]) if len(node.inputs) == 1 and keeps_residual(node) else None


def keeps_residual(node: Node) -> bool:
    """True for views, activations and norms, which may stand between residual sums."""
    return node.name in VIEWS or node.name in ACTIVATIONS or any(norm in node.name for norm in NORMS)


def mixes_tokens(node: Node) -> bool:
    return "softmax" in node.name or "attention" in node.name


def ancestors(trace: Trace, index: int) -> set[int]:
    seen: set[int] = set()
    todo = [index]
    while todo:
        at = todo.pop()
        if at >= 0 and at not in seen:
            seen.add(at)
            todo += trace.nodes[at].inputs
    return seen


def find_chain(trace: Trace, start: int, end: int) -> tuple[str, ...] | None:
    """The modules and functions that lead from one node to another; None if they are no plain chain."""
    steps: list[str] = []
    at = end
    while at != start:
        if at < start:
            return None
        calls = [call for call in trace.calls if call.output == at and start <= call.input < at]
        if calls:
            outer: ModuleCall = min(calls, key=lambda call: call.input)
            steps.insert(0, outer.path)
            at = outer.input
            continue
        node = trace.nodes[at]
        if len(node.inputs) != 1:
            return None
        if node.name in FUNCTIONS:
            steps.insert(0, f"={node.name}")
        elif node.name not in VIEWS:
            return None
        at = node.inputs[0]
    return tuple(steps)
