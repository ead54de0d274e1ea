"""Load a trained classifier's weights, and its plan, into the backbone of another model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
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
    """What `load_backbone_` did."""

    source: str
    at: str  # the backbone's name in the model: backbone.body
    plan: Plan | None  # carried out on the model, if the file has one
    loaded: tuple[str, ...]  # tensors of the model
    unused: tuple[str, ...]  # tensors of the file that the backbone does not have, as a classifier's head
    outside: int  # tensors of the model that are not the backbone's: heads and the like

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.loaded)} tensors loaded into {self.at or 'the model'}"]
        if self.plan is not None:
            names = ", ".join(target.name for target in self.plan.targets)
            lines.append(f"{len(self.plan.targets)} blocks replaced as its plan says: {names}")
        if self.unused:
            lines.append(f"not used, since the backbone has none: {', '.join(self.unused)}")
        if self.outside:
            lines.append(f"{self.outside} tensors outside the backbone keep their start")
        return "; ".join(lines)


@ordinary_tensors()
def load_backbone_(model: nn.Module, source: Source) -> LoadedBackbone:
    """Fill the backbone of a fresh detector or segmenter from a trained classifier, replaced as that is.

    `source` is a file that `replearn.save` or a run wrote, any safetensors file, or a state dict; a plan in it is
    carried out on the backbone first. The backbone is the part in which most names agree; heads keep their start.
    Raises ReplearnError, with the model unchanged, where no part has these names, where the plan does not fit, or
    where a tensor of the backbone is missing or has another shape.

    >>> import replearn
    >>> from torch import nn
    >>> classifier = replearn.models.resnet32()
    >>> model = nn.ModuleDict({"body": replearn.models.resnet32(), "head": nn.Linear(64, 5)})
    >>> load_backbone_(model, classifier.state_dict()).at
    'body'
    """
    refuse_wrapped(model)
    if isinstance(source, Mapping) and not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and not tensor.is_nested
        for name, tensor in source.items()
    ):
        raise ReplearnError("A state dict maps names to tensors; this mapping holds something else.")
    named = "the state dict" if isinstance(source, Mapping) else os.fspath(source)
    found, tensors = (None, source) if isinstance(source, Mapping) else read_weights(source)
    at = place_of(model, tensors, named)
    prefix = f"{at}." if at else ""
    moved = None if found is None else moved_plan(model, found, prefix, named)
    with nullcontext() if moved is None else restored_on_error(model, moved):
        if moved is not None:
            exchange_(model, moved, start=True)
        own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}
        given = {prefix + name: tensor for name, tensor in tensors.items() if prefix + name in own}
        if misfits := misfits_of(own, given):
            more = f", and {len(misfits) - 3} more" if len(misfits) > 3 else ""
            raise ReplearnError(
                f"{named} does not fill {at or 'the model'} of this {type(model).__name__}. "
                f"{', '.join(misfits[:3])}{more}. Use a classifier of the same backbone. The model is unchanged."
            )
        try:
            check_weights(model, own, given)
        except ReplearnError as error:
            raise ReplearnError(f"{named} can't be loaded: {error} The model is unchanged.") from error
        for name, tensor in given.items():
            own[name].copy_(tensor)
    return LoadedBackbone(
        source=named,
        at=at,
        plan=moved,
        loaded=tuple(own),
        unused=tuple(sorted(name for name in tensors if prefix + name not in own)),
        outside=len(model.state_dict()) - len(own),
    )


def read_weights(path: str | os.PathLike[str]) -> tuple[Plan | None, dict[str, Tensor]]:
    """The plan, if there is one, and the tensors of a safetensors file."""
    if not os.path.isfile(path):
        raise ReplearnError(f"There is no file {os.fspath(path)} to read weights from.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                return None, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ReplearnError(
            f"{os.fspath(path)} can't be read as a safetensors file: {error}. For weights in another format, read "
            "them yourself and pass the state dict."
        ) from error
    return read(path)


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


def misfits_of(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """The backbone's tensors that the file lacks, or has in another shape."""
    missing = [f"{name} is missing" for name in own if name not in given]
    return missing + [
        f"{name} is {shape_of(tensor)} there, {shape_of(own[name])} here"
        for name, tensor in given.items()
        if own[name].shape != tensor.shape
    ]


def shape_of(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape) or "a number"
