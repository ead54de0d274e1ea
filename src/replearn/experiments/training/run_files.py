"""The files of a run: the lock of its folder, its checkpoint, its result, and the trained model."""

import copy
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...errors import ReplearnError
from ...planning.serialization import encode
from ...surgery.checkpoint import save
from ...surgery.replace import operators_of
from .results import Result, epoch_from_dict, hardware_of, now, provenance, versions_of, write_atomically
from .run import Run, RunSpec
from .state import collect, read_state, restore, write_state


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder until the end of the block, or until the process ends.

    ReplearnError with process and host of the holder if it is locked.
    """
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        if find_spec("fcntl"):  # not on Windows
            fcntl = import_module("fcntl")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise ReplearnError(
                    f"{folder} is being trained by {file.read(200).strip() or 'another process'}. Wait for it, "
                    "stop it, or choose another folder with --out."
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {now()}")
        file.flush()
        yield


def save_run(run: Run) -> None:
    """Write the state; call it in every process."""
    sums = run.processes.total(run.sums.clone()).tolist()
    about = {
        "identity": identity(run.spec),
        "epoch": run.epoch,
        "step": run.step_in_epoch,
        "sums": sums,
        "seconds": run.seconds,
        "epochs": [epoch.to_dict() for epoch in run.epochs],
        "method": run.method.state(),
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "notes": run.notes,
        "started": run.started,
    }
    tensors, held = collect(run.bare, run.optimizer)
    if run.processes.leads:
        write_state(run.checkpoint, tensors, {**about, "optimizer": held})
    run.processes.agree(True, run.device)  # no process continues before the file is there


def resume_run(run: Run) -> bool:
    """Continue from the checkpoint, if there is one; ReplearnError if it is of another run."""
    found = run.checkpoint
    if not found.exists():
        return False
    try:
        _restore(run, found)
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        if isinstance(error, ReplearnError):
            raise
        raise ReplearnError(
            f"The checkpoint {found} can't be read: it does not hold what a run needs ({type(error).__name__}: "
            f"{str(error)[:200]}). Delete it to start anew."
        ) from error
    return True


def _restore(run: Run, found: Path) -> None:
    tensors, about = read_state(found)
    if changed := sorted(k for k, v in identity(run.spec).items() if about["identity"].get(k) != v):
        raise ReplearnError(
            f"{found} belongs to another run (its {', '.join(changed)} differ). Use another folder, "
            "or delete it to start anew."
        )
    run.method.load_state(run.bare, about["method"])
    run.rebuild()
    restore(tensors, about["optimizer"], run.bare, run.optimizer)
    if run.scaler is not None:
        run.scaler.load_state_dict(about["scaler"])
    if run.processes.leads:  # the sums of all processes were saved as one
        run.sums.copy_(torch.tensor(about["sums"]))
    run.epoch, run.step_in_epoch = about["epoch"], about["step"]
    run.seconds, run.own_notes, run.started = about["seconds"], about["notes"], about["started"]
    run.epochs = [epoch_from_dict(entry) for entry in about["epochs"]]


def identity(spec: RunSpec) -> dict[str, Any]:
    """The settings that a checkpoint and its run must share."""
    recipe = encode(spec.recipe)
    for field in ("variants", "paper", "data"):
        recipe.pop(field)
    values = {"recipe": recipe, "variant": encode(spec.variant), "data": spec.data, "seed": spec.seed}
    return dict(json.loads(json.dumps(values)))


def write_model(run: Run) -> None:
    """Write the trained model, with its plan if it has one: `replearn.load` reads it."""
    if not run.processes.leads:
        return
    model = run.method.finish(copy.deepcopy(run.bare))
    path = run.spec.out / "model.safetensors"
    if any(True for _ in operators_of(model)):
        save(model, path)
    else:
        recipe = run.spec.recipe
        about = {"model": recipe.model, "outputs": [run.spec.data, list(recipe.classes)]}
        write_state(path, model.state_dict(), about)


def result_of(run: Run) -> Result:
    return Result(
        recipe=encode(run.spec.recipe),
        variant=encode(run.spec.variant),
        data=run.spec.data,
        seed=run.spec.seed,
        plan=None if run.method.plan is None else json.loads(run.method.plan.to_json()),
        parameters=run.parameters,
        flops=run.flops,
        step_ms=run.step_ms,
        epochs=tuple(run.epochs),
        hardware=hardware_of(run.device) | {"processes": run.processes.world},
        versions=versions_of(),
        started=run.started,
        finished=run.finished,
        notes=tuple(run.notes),
        command=provenance()[0],
        commit=provenance()[1],
    )


def write_result(run: Run) -> Result:
    result = result_of(run)
    if run.processes.leads:
        write_atomically(run.spec.out / "result.json", result.to_json())
    return result
