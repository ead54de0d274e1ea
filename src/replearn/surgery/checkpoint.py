"""Save and load: one safetensors file with the weights, the plan and a checksum of both."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import ReplearnError
from ..planning.data import Plan
from ..planning.serialization import parse
from ..planning.validate import ordinary_tensors, refuse_wrapped
from .replace import check_fit, exchange_, plan_of, restored_on_error
from .state_dicts import check_copyable, check_names, check_storable, plain_names, tied
from .tensor_file import LARGEST_HEADER, read_file, write_file

FORMAT = "replearn-checkpoint-1"
PathLike = str | os.PathLike[str]


def save(model: nn.Module, path: PathLike, *, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a replaced model's weights and its plan to one safetensors file, atomically.

    An existing file is replaced only once the new one is on the disk. Tied weights are stored once. `state` is the
    full state dict of a model that is sharded over processes; by default it is the model's own. Raises
    ReplearnError for what can't be stored.
    """
    plan = plan_of(model)
    name = _path(path)
    try:
        own = plain_names(model.state_dict())
        tensors = own if state is None else plain_names(state)
        file = Path(os.path.realpath(name))  # a link is followed, not replaced
        check_storable(tensors)
        if state is not None:
            check_names(own, tensors, "the state that you gave")
        if not file.parent.is_dir():
            raise ReplearnError(f"the folder {file.parent} does not exist; create it first.")
        aliases = tied(tensors)
        kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        about = {"format": FORMAT, "plan": plan.to_json(), "aliases": json.dumps(aliases)}
        write_file(file, kept, about)
    except (OSError, ValueError) as error:
        end = "" if str(error).endswith(".") else "."
        raise ReplearnError(
            f"Can't save to {path}: {error}{end} Nothing was written; what was there before is untouched."
        ) from error


@ordinary_tensors()
def load(model: nn.Module, path: PathLike) -> nn.Module:
    """Replace the blocks of a fresh model as the file's plan says, load the weights, and return the model.

    `model` is the unmodified architecture, on any device and in any dtype. Raises ReplearnError, with the model
    unchanged, for a file that is damaged or no checkpoint of replearn, a plan that does not fit, and missing or
    unexpected keys. Nothing is unpickled.

    >>> import replearn, tempfile
    >>> model, fresh = replearn.models.resnet32(), replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replearn.save(model, f"{folder}/run.safetensors")
    ...     _ = replearn.load(fresh, f"{folder}/run.safetensors")
    >>> bool((fresh.fc.weight == model.fc.weight).all())
    True
    """
    refuse_wrapped(model)
    try:
        elements = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        # at most 8 bytes an element, twice for corrections
        plan, tensors = read(path, largest=2 * 8 * elements + LARGEST_HEADER)
        check_fit(model, plan)
        with restored_on_error(model, plan):
            exchange_(model, plan, start=False)
            own = model.state_dict()
            # all checks come before the first copy, so that a model is never half loaded
            check_names(own, tensors, "the file")
            check_copyable(model, own, tensors)
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
    except ReplearnError as error:
        raise ReplearnError(f"Can't load {path}: {error} The model is unchanged.") from error
    return model


def read(path: PathLike, largest: int | None = None) -> tuple[Plan, dict[str, Tensor]]:
    """The plan and the tensors of a checkpoint of at most `largest` bytes, tied ones under each name."""
    file = Path(_path(path))
    about, tensors = read_file(file, FORMAT, largest)
    plan = Plan.from_json(about.get("plan", ""))
    return plan, {**tensors, **{name: tensors[kept] for name, kept in _aliases(about, tensors).items()}}


def _aliases(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    try:
        aliases: Any = parse(about.get("aliases", ""), "it")
    except ReplearnError:
        aliases = None
    if not isinstance(aliases, dict) or not all(
        isinstance(kept, str) and kept in tensors and name not in tensors for name, kept in aliases.items()
    ):
        raise ReplearnError("Its list of tied weights is damaged. Use another copy.")
    return aliases


def _path(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ReplearnError(f"Expected the name of a file, as 'run.safetensors', got {type(path).__name__}.")
    return os.fsdecode(path)
