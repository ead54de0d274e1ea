"""How the code around a stack uses its blocks, from a trace that needs no data.

The trace is an approximation: a traced value is false as a condition, and has as many items as the list of blocks.
It finds blocks that run in parallel, as heads do, and code that reads parts of blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx, nn

from .recording import RecordedDict, TensorProxy
from .running import PrivateRandom
from .tracing import ModuleTracer, is_container, is_sequence

MAX_GUESSES = 10_000  # code that needs more may loop until a condition is true
MUTATING = ("append", "extend", "insert", "update", "__setitem__")


@dataclass(frozen=True)
class Use:
    """How code uses the blocks of a stack: which feed each other, and which parts of them it reads itself."""

    parallel: frozenset[tuple[str, str]]  # neighbours that are both called, neither on the other's output
    reads: dict[str, str]  # by block: a part of it that outside code reads


class _GuessedLength:
    tracer: Any

    def __len__(self) -> int:
        return int(self.tracer.guess(self.tracer.count))

    __index__ = __len__


class _Value(_GuessedLength, TensorProxy):  # type: ignore[misc]
    """A traced tensor, list or dict."""


class _Number(_GuessedLength, fx.Proxy):
    """A traced size."""


class GuessingTracer(ModuleTracer):
    """Traces the module that holds the blocks, by guessing conditions and lengths.

    `blocks` maps a block's name in this module to its name in the model.
    """

    def __init__(self, blocks: Mapping[str, str], count: int, training: bool) -> None:
        super().__init__(lambda default: default)
        self.blocks, self.count, self.training, self.guesses = blocks, count, training, 0
        self.reads: dict[str, str] = {}

    def prepare(self) -> None:
        for path, module in self.root.named_modules():
            module.training = self.training
            if path in self.blocks:
                vars(module)["_modules"] = RecordedDict(module._modules, self.record_part)

    def record_part(self, part: Any) -> Any:
        self.note_read((self.submodule_paths or {}).get(part, ""))
        return part

    def note_read(self, path: str) -> None:
        for name, block in self.blocks.items():
            if path.startswith(f"{name}."):
                self.reads.setdefault(block, path.removeprefix(f"{name}."))

    def guess(self, value: Any) -> Any:
        self.guesses += 1
        if self.guesses > MAX_GUESSES:
            raise fx.proxy.TraceError("it loops on values")
        return value

    def to_bool(self, obj: Any) -> bool:
        return bool(self.guess(False))

    def iter(self, obj: Any) -> Any:
        return iter([obj[index] for index in range(self.guess(self.count))])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.blocks or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self) if isinstance(super().proxy(node), TensorProxy) else _Number(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) is _Value else super().create_arg(a)


def find_use(model: nn.Module, blocks: Sequence[str], training: bool) -> Use | None:
    """How the innermost module whose code calls or reads these siblings uses them.

    None if no trace shows that, and for an nn.Sequential, which runs them in order.
    """
    owner = blocks[0].rpartition(".")[0]
    count = len(model.get_submodule(owner)._modules)
    if is_sequence(model.get_submodule(owner)):
        return None
    path = owner.split(".") if owner else []
    for depth in range(len(path), -1, -1):
        module = model.get_submodule(".".join(path[:depth]))
        if is_container(module) or is_sequence(module):
            continue
        tracer = GuessingTracer({".".join(name.split(".")[depth:]): name for name in blocks}, count, training)
        inputs = _blocks_before(module, tracer)
        if inputs or tracer.reads:
            pairs = [(one, other) for one, other in pairwise(blocks) if inputs.keys() >= {one, other}]
            parallel = (
                pair for pair in pairs if pair[0] not in inputs[pair[1]] and pair[1] not in inputs[pair[0]]
            )
            return Use(frozenset(parallel), tracer.reads)
    return None


def _blocks_before(module: nn.Module, tracer: GuessingTracer) -> dict[str, set[str]]:
    """For each block that is called, the blocks that its input depends on."""
    try:
        with PrivateRandom():
            tracer.trace(module)
    except Exception:
        if not hasattr(tracer, "graph"):  # it failed before the first node; else the graph so far counts
            return {}
    upstream: dict[fx.Node, set[str]] = {}  # by node: the blocks that its value depends on
    inputs: dict[str, set[str]] = {}
    for node in tracer.graph.nodes:
        upstream[node] = set().union(*(upstream[source] for source in node.all_input_nodes))
        if node.op == "call_method" and (node.target in MUTATING or str(node.target).endswith("_")):
            upstream[node.args[0]] |= upstream[node]  # a list that is passed around
        if node.op == "call_module" and node.target in tracer.blocks:
            name = tracer.blocks[str(node.target)]
            inputs.setdefault(name, set()).update(upstream[node])
            upstream[node].add(name)
        elif node.op == "get_attr":
            tracer.note_read(str(node.target))
    return inputs
