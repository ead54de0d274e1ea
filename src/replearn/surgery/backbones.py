"""Load a trained classifier's weights, and its plan, into the backbone of another model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..blocks.stacks import find_stacks
from ..errors import ReplearnError
from ..planning.data import Plan, Target
from ..planning.planner import plan, plan_of_targets
from ..planning.validate import ordinary_tensors, refuse_wrapped
from .checkpoint import FORMAT, read
from .replace import exchange_, restored_on_error
from .state_dicts import check_weights

Source = str | os.PathLike[str] | Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LoadedBackbone:
    """What `load_backbone_` did: names of tensors in the model, and of the file's with the reason."""

    source: str
    at: str  # the backbone's name in the model: backbone.body
    plan: Plan | None  # carried out on the model, if the file has one
    loaded: tuple[str, ...]
    kept: tuple[str, ...]  # tensors of the backbone that the file has not: they keep their start
    unused: tuple[tuple[str, str], ...]  # the file's tensors that went nowhere, and why
    outside: int  # tensors of the model that are not the backbone's: heads and the like

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.loaded)} tensors loaded into {self.at or 'the model'}"]
        if self.plan is not None:
            names = ", ".join(target.name for target in self.plan.targets)
            lines.append(f"{len(self.plan.targets)} blocks replaced as its plan says: {names}")
        if self.unused:
            lines.append("not used: " + "; ".join(f"{name} ({why})" for name, why in self.unused))
        if self.kept:
            lines.append(f"kept as they were: {', '.join(self.kept)}")
        if self.outside:
            lines.append(f"{self.outside} tensors outside the backbone keep their start")
        return "; ".join(lines)


@ordinary_tensors()
def load_backbone_(
    model: nn.Module, source: Source, *, at: str | None = None, strict: bool = True
) -> LoadedBackbone:
    """Fill the backbone of a fresh detector or segmenter from a trained classifier, replaced as that is.

    `source` is a file that `replearn.save` or a run wrote, any safetensors file, or a state dict; a plan in it is
    carried out on the backbone first. `at` names the backbone (`backbone.body`); by default it is where most names
    agree. Heads keep their start. The report says what was loaded and what was not. Raises ReplearnError, with the
    model unchanged, where no part has these names, where the plan does not fit, or where a tensor of the backbone
    is missing or has another shape (not so with `strict=False`).

    >>> import replearn
    >>> from torch import nn
    >>> classifier = replearn.models.resnet32()
    >>> model = nn.ModuleDict({"body": replearn.models.resnet32(num_classes=5)})
    >>> report = load_backbone_(model, classifier.state_dict(), strict=False)
    >>> report.at, report.unused[0]
    ('body', ('fc.bias', '10 there, 5 here'))
    """
    refuse_wrapped(model)
    if isinstance(source, Mapping) and not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and not tensor.is_nested
        for name, tensor in source.items()
    ):
        raise ReplearnError("A state dict maps names to tensors; this mapping holds something else.")
    named = "the state dict" if isinstance(source, Mapping) else os.fspath(source)
    found, tensors = (None, dict(source)) if isinstance(source, Mapping) else read_weights(source)
    where = place_of(model, tensors, named) if at is None else at
    if where:
        try:
            model.get_submodule(where)
        except AttributeError as error:
            raise ReplearnError(
                f"at={where!r}: this {type(model).__name__} has no such part ({error})."
            ) from error
    prefix = f"{where}." if where else ""
    moved = None if found is None else moved_plan(model, found, prefix, named)
    guard: AbstractContextManager[None] = nullcontext() if moved is None else restored_on_error(model, moved)
    with guard:
        if moved is not None:
            exchange_(model, moved, start=True)
        own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}
        wrong, unused = compared(own, tensors, prefix)
        found_here = {prefix + name: tensors[name] for name in tensors if name not in unused}
        kept = sorted(own.keys() - found_here.keys())
        if strict and (wrong or kept):
            misfits = [f"{name} is {unused[name]}" for name in wrong]
            misfits += [f"{name} is missing" for name in kept if not name.endswith(tuple(unused))]
            more = f", and {len(misfits) - 3} more" if len(misfits) > 3 else ""
            raise ReplearnError(
                f"{named} does not fill {where or 'the model'} of this {type(model).__name__}. "
                f"{', '.join(misfits[:3])}{more}. Use a classifier of the same backbone, or write strict=False to "
                "take what fits. The model is unchanged."
            )
        try:
            check_weights(model, {name: own[name] for name in found_here}, found_here)
        except ReplearnError as error:
            raise ReplearnError(f"{named} can't be loaded: {error} The model is unchanged.") from error
        for name, tensor in found_here.items():
            own[name].copy_(tensor)
    return LoadedBackbone(
        source=named,
        at=where,
        plan=moved,
        loaded=tuple(sorted(found_here)),
        kept=tuple(kept),
        unused=tuple(unused.items()),
        outside=len(model.state_dict()) - len(own),
    )


def read_weights(path: str | os.PathLike[str]) -> tuple[Plan | None, dict[str, Tensor]]:
    """The plan, if there is one, and the tensors of a safetensors file."""
    if not os.path.isfile(path):
        raise ReplearnError(f"There is no file {os.fspath(path)} to read weights from.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            ours = (file.metadata() or {}).get("format") == FORMAT
            tensors = {} if ours else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ReplearnError(
            f"{os.fspath(path)} can't be read as a safetensors file: {error}. For weights in another format, read "
            "them yourself and pass the state dict."
        ) from error
    return read(path) if ours else (None, tensors)


def place_of(model: nn.Module, tensors: Mapping[str, Tensor], named: str) -> str:
    """The part of the model below which most of these names are found; of equals the outermost."""
    votes: Counter[str] = Counter()
    for name in model.state_dict():
        parts = name.split(".")
        votes.update(".".join(parts[:start]) for start in range(len(parts)) if ".".join(parts[start:]) in tensors)
    if not votes:
        first = next(iter(tensors), "nothing")
        raise ReplearnError(
            f"No part of this {type(model).__name__} has the tensors of {named} (it holds {first}, ...). Use a "
            "classifier of the same backbone."
        )
    return min(votes, key=lambda part: (-votes[part], part.count(".")))


def moved_plan(model: nn.Module, found: Plan, prefix: str, named: str) -> Plan:
    """The plan of the file, made anew for the model that its backbone is in now."""
    targets: list[Target] = []
    try:
        for operator in dict.fromkeys(target.operator for target in found.targets):
            names = [f"{prefix}{target.name}" for target in found.targets if target.operator == operator]
            targets += plan(model, targets=names, operator=operator).targets
    except ReplearnError as error:
        raise ReplearnError(f"The plan of {named} can't be carried out on {prefix}*: {error}") from error
    placement = f"as in a {found.model} ({found.placement})"
    return plan_of_targets(model, targets, placement, sum(len(stack) for stack in find_stacks(model)))


def compared(
    own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], prefix: str
) -> tuple[list[str], dict[str, str]]:
    """The file's tensors of another shape, and all that go nowhere, with the reason."""
    wrong, unused = [], {}
    for name, tensor in sorted(tensors.items()):
        here = own.get(prefix + name)
        if here is None:
            unused[name] = "the backbone has no such tensor"
        elif here.shape != tensor.shape:
            unused[name] = f"{shape_of(tensor)} there, {shape_of(here)} here"
            wrong.append(name)
    return wrong, unused


def shape_of(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape) or "a number"
