"""What the code around a stack does with its blocks, seen in a trace that needs no data.

It is a sketch: where code asks a traced value for a truth, a length or its items, it is told no, or as many as the
list of blocks has. It proves nothing, but shows heads that run side by side, and code that reads parts of blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx, nn

from .running import PrivateRandom
from .shadow import Reads, TensorProxy
from .tracing import OneForward, is_sequence, runs_nothing

MOST_ANSWERS = 10_000  # code that asks more often may wait for another answer for ever
MUTATING = ("append", "extend", "insert", "update", "__setitem__")


@dataclass(frozen=True)
class Use:
    """How code uses the blocks of a stack: which ones feed each other, and which parts it reads itself."""

    apart: frozenset[tuple[str, str]]  # neighbours that were both called, neither on what the other made
    reads: dict[str, str]  # by block: a part of it that was read from outside


class _Answers:
    tracer: Any

    def __len__(self) -> int:
        return int(self.tracer.answer(self.tracer.count))

    __index__ = __len__


class _Value(_Answers, TensorProxy):  # type: ignore[misc]
    """A traced tensor, list or dict."""


class _Number(_Answers, fx.Proxy):
    """A traced size."""


class Sketch(OneForward):
    """A trace of the module that holds the blocks, whose names in it and in the model are given."""

    def __init__(self, blocks: Mapping[str, str], count: int, training: bool) -> None:
        super().__init__(lambda default: default)
        self.blocks, self.count, self.training, self.answers = blocks, count, training, 0
        self.reads: dict[str, str] = {}

    def prepare(self) -> None:
        for path, module in self.root.named_modules():
            module.training = self.training
            if path in self.blocks:
                vars(module)["_modules"] = Reads(module._modules, self.record_part)

    def record_part(self, part: Any) -> Any:
        self.note_read((self.submodule_paths or {}).get(part, ""))
        return part

    def note_read(self, path: str) -> None:
        for name, block in self.blocks.items():
            if path.startswith(f"{name}."):
                self.reads.setdefault(block, path.removeprefix(f"{name}."))

    def answer(self, value: Any) -> Any:
        self.answers += 1
        if self.answers > MOST_ANSWERS:
            raise fx.proxy.TraceError("it asks for ever")
        return value

    def to_bool(self, obj: Any) -> bool:
        return bool(self.answer(False))

    def iter(self, obj: Any) -> Any:
        return iter([obj[index] for index in range(self.answer(self.count))])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.blocks or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        made = super().proxy(node)
        return _Value(node, self) if isinstance(made, TensorProxy) else _Number(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) is _Value else super().create_arg(a)


def use_of(model: nn.Module, blocks: Sequence[str], training: bool) -> Use | None:
    """How the innermost code that calls or reads these siblings uses them.

    None where that can't be seen, and for an nn.Sequential, which runs one after another.
    """
    owner = blocks[0].rpartition(".")[0]
    count = len(model.get_submodule(owner)._modules)
    if is_sequence(model.get_submodule(owner)):
        return None
    way = owner.split(".") if owner else []
    for depth in range(len(way), -1, -1):
        module = model.get_submodule(".".join(way[:depth]))
        if runs_nothing(module) or is_sequence(module):
            continue
        names = {".".join(name.split(".")[depth:]): name for name in blocks}
        sketch = Sketch(names, count, training)
        fed = _fed(module, sketch)
        if fed or sketch.reads:
            pairs = [pair for pair in pairwise(blocks) if fed.keys() >= set(pair)]
            apart = (pair for pair in pairs if pair[0] not in fed[pair[1]] and pair[1] not in fed[pair[0]])
            return Use(frozenset(apart), sketch.reads)
    return None


def _fed(module: nn.Module, sketch: Sketch) -> dict[str, set[str]]:
    """By block that is called: the blocks that it is fed by, one after another."""
    try:
        with PrivateRandom():
            sketch.trace(module)
    except Exception:
        if not hasattr(sketch, "graph"):  # it could not begin; what was seen before an error counts
            return {}
    before: dict[fx.Node, set[str]] = {}  # by node: the blocks that what it makes depends on
    fed: dict[str, set[str]] = {}
    for node in sketch.graph.nodes:
        before[node] = set().union(*(before[source] for source in node.all_input_nodes))
        if node.op == "call_method" and (node.target in MUTATING or str(node.target).endswith("_")):
            before[node.args[0]] |= before[node]  # a list that is passed around
        if node.op == "call_module" and node.target in sketch.blocks:
            name = sketch.blocks[str(node.target)]
            fed.setdefault(name, set()).update(before[node])
            before[node].add(name)
        elif node.op == "get_attr":
            sketch.note_read(str(node.target))
    return fed
