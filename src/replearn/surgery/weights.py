"""Trained weights from a file or a state dict, loaded into a fresh model or into its backbone."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ..blocks.stacks import find_stacks
from ..errors import ReplearnError, first_line
from ..planning.data import Plan, Target
from ..planning.planner import plan, plan_of_targets
from ..planning.validate import ordinary_tensors, refuse_wrapped
from .checkpoint import FORMAT, read
from .replace import exchange_, restored_on_error
from .state_dicts import check_weights

Source = str | os.PathLike[str] | Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LoadedBackbone:
    """The result of `load_backbone_`."""

    source: str
    at: str  # the backbone's name in the model: backbone.body
    plan: Plan | None  # carried out on the model, if the file has one
    loaded: tuple[str, ...]  # tensors of the model
    unused: tuple[str, ...]  # tensors of the file that the backbone does not have, as those of a classifier's head
    outside: int  # tensors of the model outside of the backbone, as those of heads

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
    """Load the backbone of a fresh detector or segmenter from a trained classifier, replaced as that is.

    `source` is a file that `replearn.save` or a run wrote, any safetensors file, a torch file of tensors alone, or
    a state dict; a plan in it is carried out on the backbone first. The backbone is the submodule that has the
    most of the names; the rest of the model is not changed. Raises ReplearnError, with the model unchanged, if no
    submodule has these names, if the plan does not fit, or if a tensor of the backbone is missing or has another
    shape.

    >>> import replearn
    >>> from torch import nn
    >>> classifier = replearn.models.resnet32()
    >>> model = nn.ModuleDict({"body": replearn.models.resnet32(), "head": nn.Linear(64, 5)})
    >>> load_backbone_(model, classifier.state_dict()).at
    'body'
    """
    refuse_wrapped(model)
    if isinstance(source, Mapping) and not is_state_dict(source):
        raise ReplearnError("A state dict maps names to tensors; this mapping holds something else.")
    named = "the state dict" if isinstance(source, Mapping) else os.fspath(source)
    found, tensors = (None, source) if isinstance(source, Mapping) else read_weights(source)
    at = find_backbone(model, tensors, named)
    prefix = f"{at}." if at else ""
    moved = None if found is None else plan_below(model, found, prefix, named)

    def backbone(own: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {prefix + name: tensor for name, tensor in tensors.items() if prefix + name in own}
        if misfits := misfits_of({name: own[name] for name in own if name.startswith(prefix)}, given):
            more = f", and {len(misfits) - 3} more" if len(misfits) > 3 else ""
            raise ReplearnError(
                f"{named} does not fill {at or 'the model'} of this {type(model).__name__}. "
                f"{', '.join(misfits[:3])}{more}. Use a classifier of the same backbone. The model is unchanged."
            )
        return given

    given = fill_(model, moved, named, backbone)
    return LoadedBackbone(
        source=named,
        at=at,
        plan=moved,
        loaded=tuple(given),
        unused=tuple(sorted(name for name in tensors if prefix + name not in given)),
        outside=len(model.state_dict()) - len(given),
    )


def find_backbone(model: nn.Module, tensors: Mapping[str, Tensor], named: str) -> str:
    """The submodule below which most of these names are found; the outermost of several."""
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


def misfits_of(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """The backbone's tensors that are missing in the file or have another shape there."""
    missing = [f"{name} is missing" for name in own if name not in given]
    return missing + [
        f"{name} is {shape_of(tensor)} there, {shape_of(own[name])} here"
        for name, tensor in given.items()
        if own[name].shape != tensor.shape
    ]


def read_weights(path: str | os.PathLike[str]) -> tuple[Plan | None, dict[str, Tensor]]:
    """The tensors of a safetensors file or of a torch file of tensors alone, and the plan of a checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise ReplearnError(
            f"There is no file {path} to start from. Write the name of a safetensors file or of a torch file; "
            "training can start from timm:NAME too."
        )
    about = metadata_of(path)
    if about.get("format") == FORMAT:
        return read(path)
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            # safetensors stores one of several tied tensors, and its name as metadata of the others' names
            return None, tensors | {name: tensors[kept] for name, kept in about.items() if kept in tensors}
        refuse_compressed(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a malformed pickle can raise any error
        # the message of UnpicklingError advises to run the code in the file
        known = isinstance(error, (SafetensorError, OSError, RuntimeError, ReplearnError))
        reason = first_line(error) if known else "it is no file of torch.save, or holds more than tensors"
        raise ReplearnError(
            f"{path} can't be read as weights: {reason}. Use a safetensors file, or a torch file that holds "
            "tensors alone."
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not is_state_dict(loaded):
        raise ReplearnError(f"{path} holds no state dict; save one with torch.save(model.state_dict(), FILE).")
    return None, dict(loaded)


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty for any other file."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def refuse_compressed(path: Path) -> None:
    """Raise for a compressed zip, which torch.save never writes: it may be a zip bomb."""
    if not is_zipfile(path):
        return
    with ZipFile(path) as file:
        if any(entry.compress_type != ZIP_STORED for entry in file.infolist()):
            raise ReplearnError(
                "its entries are packed, and torch.save packs none: it may be far larger than it looks"
            )


def is_state_dict(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) and not tensor.is_nested
        for name, tensor in given.items()
    )


def fill_(
    model: nn.Module, moved: Plan | None, named: str, choose: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Carry out the plan, if any, then copy the tensors that `choose` returns for the model's state dict.

    Returns these tensors. Raises ReplearnError, with the model unchanged, if `choose` does or a tensor can't be
    copied.
    """
    with nullcontext() if moved is None else restored_on_error(model, moved):
        if moved is not None:
            exchange_(model, moved, start=True)
        own = model.state_dict()
        given = choose(own)
        try:
            check_weights(model, {name: own[name] for name in given}, given)
        except ReplearnError as error:
            raise ReplearnError(f"{named} can't be loaded: {error} The model is unchanged.") from error
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)
    return given


def plan_below(model: nn.Module, found: Plan, prefix: str, named: str) -> Plan:
    """The plan of a backbone, made again for a model that has this backbone below `prefix`."""
    targets: list[Target] = []
    try:
        for operator in dict.fromkeys(target.operator for target in found.targets):
            names = [f"{prefix}{target.name}" for target in found.targets if target.operator == operator]
            targets += plan(model, targets=names, operator=operator).targets
    except ReplearnError as error:
        raise ReplearnError(f"The plan of {named} can't be carried out on {prefix}*: {error}") from error
    placement = f"as in a {found.model} ({found.placement})"
    return plan_of_targets(model, targets, placement, sum(len(stack) for stack in find_stacks(model)))


def shape_of(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape) or "a number"
