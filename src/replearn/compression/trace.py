"""What a block computes: the operations of one run, which tensor goes where, and its residual sums."""

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
from .calls import Arguments, Key, slow_attention

SAME = {
    *("t", "transpose", "view", "_unsafe_view", "reshape", "permute"),
    *("detach", "alias", "expand", "_to_copy", "unsqueeze"),
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: the nodes whose values it reads, and the parameters and buffers."""

    index: int
    name: str  # without the underscore of in-place forms
    key: Key
    inputs: tuple[int, ...]
    tensors: tuple[str, ...]  # names of parameters and buffers below the block
    places: tuple[int, ...]  # which positional argument each input is
    dims: tuple[int, ...] = ()  # of a permutation
    shape: tuple[int, ...] = ()  # of its first result


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module inside the block: from which value to which; -1 where it is given more than that."""

    path: str
    given: int
    made: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of a block; node 0 is its input."""

    nodes: tuple[Node, ...]
    calls: tuple[Call, ...]
    output: int
    shape: tuple[int, ...] = ()  # of the output
    length: int = 0  # of the tuple that the block returns; 0 where it returns a tensor

    def users(self, index: int) -> list[Node]:
        return [node for node in self.nodes if index in node.inputs]


def trace(block: nn.Module, arguments: Arguments) -> Trace:
    """Run a block and write down what it computes; raises what its code raises."""
    recorder = _Recorder(block)
    own = arguments.given(arguments.x.clone())
    recorder.begin(own.x)
    with slow_attention(), recorder.watching(), torch.no_grad(), recorder:
        made = block(*own.args, **own.kwargs)
    y = first(made)
    return Trace(
        tuple(recorder.nodes),
        tuple(recorder.calls),
        recorder.node_of(y),
        tuple(y.shape) if isinstance(y, Tensor) else (),
        len(made) if isinstance(made, (tuple, list)) else 0,
    )


class _Recorder(TorchDispatchMode):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block = block
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self._counts: Counter[str] = Counter()
        self._nodes: dict[int, int] = {}  # tensor: the node that made its value
        self._names: dict[int, str] = {}  # tensor: the parameter that it is, or is a view of
        self._kept: list[Any] = []  # so that no id is used twice
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            self._names[id(tensor)] = name

    def begin(self, x: Tensor) -> None:
        self._kept.append(x)
        self._nodes[id(x)] = 0
        self.nodes.append(Node(0, "input", ("input", 0), (), (), ()))

    def node_of(self, value: Any) -> int:
        return self._nodes.get(id(value), -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._note(func.overloadpacket.__name__, args, kwargs or {}, made)
        return made

    def _note(self, name: str, args: Any, kwargs: Any, made: Any) -> None:
        key = (name, self._counts[name])
        self._counts[name] += 1
        given = [(i, leaf) for i, arg in enumerate(args) for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)]
        given += [(-1, leaf) for leaf in tree_leaves(kwargs) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self._kept += [leaf for _, leaf in given] + results
        read = [(place, self._nodes[id(leaf)]) for place, leaf in given if id(leaf) in self._nodes]
        tensors = tuple(self._names[id(leaf)] for _, leaf in given if id(leaf) in self._names)
        if not read:  # computed from parameters alone
            if name in SAME and len(tensors) == 1:
                self._names.update({id(leaf): tensors[0] for leaf in results})
            return
        index = len(self.nodes)
        dims = tuple(args[1]) if name == "permute" else ()
        if name == "transpose":
            order = list(range(args[0].dim()))
            order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
            dims = tuple(order)
        nodes, places = tuple(node for _, node in read), tuple(place for place, _ in read)
        shape = tuple(results[0].shape) if results else ()
        self.nodes.append(Node(index, name.rstrip("_"), key, nodes, tensors, places, dims, shape))
        self._nodes.update({id(leaf): index for leaf in results})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the calls of every module inside the block."""
        started: list[int] = []

        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = (*args, *kwargs.values())
            self._kept.append(given)
            started.append(self.node_of(given[0]) if len(given) == 1 else -1)

        def left(path: str, module: nn.Module, args: Any, made: Any) -> None:
            self._kept.append(made)
            self.calls.append(Call(path, started.pop(), self.node_of(first(made))))

        with ExitStack() as hooks:
            for path, module in self.block.named_modules():
                if path:
                    hooks.enter_context(module.register_forward_pre_hook(entered, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(partial(left, path)))
            yield


VIEWS = {
    *("view", "_unsafe_view", "reshape", "clone", "alias"),
    *("detach", "contiguous", "dropout", "unsqueeze", "squeeze"),
}
ACTIVATIONS = ("relu", "gelu", "silu", "hardtanh", "hardswish", "elu", "leaky_relu", "tanh", "sigmoid")
FUNCTIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}  # in a chain "=relu"
NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")


@dataclass(frozen=True, slots=True)
class Sum:
    """A residual sum: stream plus branch."""

    key: Key
    index: int
    stream: int  # nodes
    branch: int
    attention: bool  # the branch mixes tokens


def residual_sums(found: Trace, index: int) -> tuple[Sum, ...] | None:
    """The sums on the way from the input to a value along which the input itself is passed on; None if none is."""
    if index <= 0:
        return () if index == 0 else None
    node = found.nodes[index]
    if node.name == "add" and len(node.inputs) == 2:
        for stream, branch in (node.inputs, node.inputs[::-1]):
            before = residual_sums(found, stream)
            if before is not None:
                own = ancestors(found, branch) - ancestors(found, stream)
                mixing = any(mixes(found.nodes[i]) for i in own)
                return (*before, Sum(node.key, index, stream, branch, mixing))
        return None
    return residual_sums(found, node.inputs[0]) if len(node.inputs) == 1 and passes(node) else None


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
        if node.name in FUNCTIONS:
            way.insert(0, f"={node.name}")
        elif node.name not in VIEWS:
            return None
        at = node.inputs[0]
    return tuple(way)
