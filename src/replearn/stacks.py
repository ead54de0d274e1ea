"""Room one: find the stacks of a model, the runs of sibling blocks that share a shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .anatomy import Anatomy
from .families import describe


@dataclass(frozen=True, slots=True)
class Stack:
    """A run of repeated sibling blocks, in the order in which they are listed."""

    name: str
    family: str
    block_type: str
    blocks: tuple[str, ...]
    anatomies: tuple[Anatomy, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.blocks)


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Find every stack of the model; touches nothing.

    Blocks of a known family are found by their class. Only if there are none does a generic
    scan look for any run of at least three equal siblings; its stacks say `family="generic"`.

    >>> import replearn
    >>> model = replearn.models.resnet32()
    >>> [(stack.name, len(stack)) for stack in replearn.find_stacks(model)]
    [('layer1', 5), ('layer2', 5), ('layer3', 5)]
    """
    known = [stack for container in _containers(model, descend=_unknown) for stack in _known_runs(*container)]
    if known:
        return tuple(stack for stack in known if len(stack) > 1)
    declared = _declared_blocks(model)
    generic = [
        stack
        for container in _containers(model, descend=lambda run: True)
        for stack in _equal_runs(*container)
        if all(declared(name, type(model.get_submodule(name)).__name__) for name in stack.blocks)
    ]
    return tuple(_outermost(generic))


def class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


Children = list[tuple[str, nn.Module]]


def _containers(model: nn.Module, descend: Callable[[nn.Module], bool]) -> Iterator[tuple[str, Children]]:
    """Every Sequential and ModuleList with the full names of its children, each container once."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, Children]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            # named_children hides repeated children; a stack must show them
            children = [
                (f"{name}.{key}" if name else key, child)
                for key, child in module._modules.items()
                if child is not None
            ]
            yield name, children
        for child_name, child in children:
            if descend(child):
                yield from walk(child_name, child)

    yield from walk("", model)


def _unknown(module: nn.Module) -> bool:
    return describe(module) is None


def _known_runs(container: str, children: Children) -> list[Stack]:
    """Runs of one family's blocks; a block that changes the shape starts a new run."""
    runs: list[list[tuple[str, nn.Module, Anatomy]]] = []
    before: tuple[str, str, type] | None = None
    for name, block in children:
        found = describe(block)
        if found is None:
            before = None
            continue
        key = (found.family, found.kind, type(block))
        if key != before or found.transition:
            runs.append([])
        runs[-1].append((name, block, found))
        before = key
    return [_stack(container, run, whole=len(run) == len(children)) for run in runs]


def _equal_runs(container: str, children: Children) -> list[Stack]:
    """Runs of one class with equal parameter shapes; the first block of a run may differ."""
    runs: list[list[tuple[str, nn.Module, Anatomy]]] = []
    last: nn.Module | None = None
    for name, block in children:
        joins = (
            last is not None
            and type(block) is type(last)
            and (len(runs[-1]) == 1 or _signature(block) == _signature(last))
        )
        if not joins:
            runs.append([])
        runs[-1].append((name, block, Anatomy("generic", "any")))
        last = block
    return [
        _stack(container, run, whole=len(run) == len(children))
        for run in runs
        if len(run) > 2 and _signature(run[1][1])
    ]


def _signature(block: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _stack(container: str, run: list[tuple[str, nn.Module, Anatomy]], *, whole: bool) -> Stack:
    names = tuple(name for name, _, _ in run)
    span = f"[{names[0].rpartition('.')[2]}..{names[-1].rpartition('.')[2]}]"
    return Stack(
        name=container if whole else f"{container}{span}",
        family=run[0][2].family,
        block_type=class_path(run[-1][1]),
        blocks=names,
        anatomies=tuple(found for _, _, found in run),
    )


def _outermost(stacks: list[Stack]) -> Iterator[Stack]:
    """Drop stacks that lie inside a block of another stack."""
    blocks = [f"{name}." for stack in stacks for name in stack.blocks]
    for stack in stacks:
        if not any(stack.blocks[0].startswith(block) for block in blocks):
            yield stack


def _declared_blocks(model: nn.Module) -> Callable[[str, str], bool]:
    """What the model itself declares to be its blocks: timm's and Hugging Face's ways.

    timm models carry a `group_matcher` whose `blocks` are patterns of names; Hugging Face
    models list the classes that must stay whole in `_no_split_modules`. Where a model declares
    nothing, every run counts.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if callable(matcher):
        blocks = matcher(coarse=False).get("blocks", ())
        entries = [blocks] if isinstance(blocks, str) else list(blocks)
        patterns = [entry if isinstance(entry, str) else entry[0] for entry in entries]
        # a pattern with a counting group names blocks; without one it names a single layer
        counting = [re.compile(pattern) for pattern in patterns if r"(\d+)" in pattern]
        if counting:
            return lambda name, kind: any(
                (found := pattern.match(f"{name}.")) is not None and found.end() >= len(name)
                for pattern in counting
            )
    classes = {kind for module in model.modules() for kind in (getattr(module, "_no_split_modules", None) or ())}
    if any(type(module).__name__ in classes for module in model.modules()):
        return lambda name, kind: kind in classes
    return lambda name, kind: True
