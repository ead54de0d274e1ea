"""What the code around a stack does with its blocks, seen in a trace that needs no data.

It is a sketch: where code asks a traced value for a truth, a length or its items, it is told no, or as many as the
list of blocks has. It proves nothing, but shows heads that run side by side, and code that reads parts of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    called: frozenset[str]
    reads: dict[str, str]  # by block: a part of it that was read from outside


class _Answers:
    tracer: Any

    def __len__(self) -> int:
        return int(self.tracer.answer(self.tracer.count))

    def __index__(self) -> int:
        return int(self.tracer.answer(self.tracer.count))


class _Value(_Answers, TensorProxy):  # type: ignore[misc]
    """A traced tensor, list or dict."""


class _Number(_Answers, fx.Proxy):
    """A traced size."""


class Sketch(OneForward):
    def __init__(self, blocks: Sequence[str], count: int, training: bool) -> None:
        super().__init__(lambda default: default)
        self.blocks, self.count, self.training, self.answers = list(blocks), count, training, 0
        self.reads: dict[str, str] = {}

    def prepare(self) -> None:
        for path, module in self.root.named_modules():
            module.training = self.training
            if path in self.blocks:
                vars(module)["_modules"] = Reads(module._modules, self.record_part)

    def record_part(self, part: Any) -> Any:
        path = (self.submodule_paths or {}).get(part, "")
        block = next((name for name in self.blocks if path.startswith(f"{name}.")), None)
        if block is not None:
            self.reads.setdefault(block, path.removeprefix(f"{block}."))
        return part

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
    while True:
        module = model.get_submodule(owner)
        if not runs_nothing(module) and not is_sequence(module):
            prefix = f"{owner}." if owner else ""
            sketch = Sketch([name.removeprefix(prefix) for name in blocks], count, training)
            seen = _sketched(module, sketch)
            if seen.called or seen.reads:
                return Use(
                    frozenset((prefix + one, prefix + other) for one, other in seen.apart),
                    frozenset(prefix + name for name in seen.called),
                    {prefix + name: part for name, part in seen.reads.items()},
                )
        if not owner:
            return None
        owner = owner.rpartition(".")[0]


def _sketched(module: nn.Module, sketch: Sketch) -> Use:
    try:
        with PrivateRandom():
            sketch.trace(module)
    except Exception:
        if not hasattr(sketch, "graph"):  # it could not begin; what was seen before an error counts
            return Use(frozenset(), frozenset(), {})
    before: dict[fx.Node, set[str]] = {}  # by node: the blocks that what it makes depends on
    fed: dict[str, set[str]] = {}
    for node in sketch.graph.nodes:
        before[node] = set().union(*(before[source] for source in node.all_input_nodes))
        if node.op == "call_method" and (node.target in MUTATING or str(node.target).endswith("_")):
            before[node.args[0]] |= before[node]  # a list that is passed around
        if node.op == "call_module" and node.target in sketch.blocks:
            name = str(node.target)
            fed.setdefault(name, set()).update(before[node])
            before[node].add(name)
        elif node.op == "get_attr":
            block = next((name for name in sketch.blocks if str(node.target).startswith(f"{name}.")), None)
            if block is not None:
                sketch.reads.setdefault(block, str(node.target).removeprefix(f"{block}."))
    pairs = zip(sketch.blocks, sketch.blocks[1:], strict=False)
    apart = {
        (one, other)
        for one, other in pairs
        if one in fed and other in fed and one not in fed[other] and other not in fed[one]
    }
    return Use(frozenset(apart), frozenset(fed), sketch.reads)
