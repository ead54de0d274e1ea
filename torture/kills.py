"""100 kills (SIGKILL) of a training on digits: every resumed run is bit-equal to the run never killed.

    python -m torture.kills

A run is killed when it is loading data, in a step, in evaluation, while it writes a checkpoint, or at any moment,
and resumed, until it comes to its end; then its weights, optimizer state, metrics, model file and log are compared
with those of a run never killed. A part of the runs has two processes (DDP). A process that is ready to
train is forked for each life, so that a life takes a second and not ten.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from replearn.experiments.training import fit as fitting
from replearn.experiments.training import run_files
from replearn.experiments.training.fit import fit
from replearn.experiments.training.image_batches import DeviceBatches
from replearn.experiments.training.recipe import Augment, Optimizer, Recipe, Schedule, Variant
from replearn.experiments.training.results import read_result
from replearn.experiments.training.run import Run, RunSpec
from replearn.experiments.training.state import read_state
from replearn.surgery import tensor_file

from .ledger import open_ledger

EPOCHS, BATCH = 4, 400
PHASES = ("data", "step", "evaluation", "checkpoint", "anywhere")
WAYS = ("one", "one", "one", "ddp", "ddp")
VARIANTS = (
    Variant(label="RepL", method="repl", interval=2),
    Variant(label="adaptive", method="adaptive", interval=2),
    Variant(label="RepL+SD", method="repl+stochastic_depth", interval=2, drop_rate=0.5),
)


def spec(out: Path, variant: Variant, way: str) -> RunSpec:
    recipe = Recipe(
        name="torture",
        table="",
        model="cifar_resnet:20:4" if way == "one" else "vit:16:4:2:4",
        data=("digits",),
        variants=VARIANTS,
        epochs=EPOCHS,
        batch_size=BATCH,
        optimizer=Optimizer(name="adamw", lr=0.01) if way != "one" else Optimizer(lr=0.1),
        schedule=Schedule(warmup_epochs=1),
        augment={"digits": Augment(pad=1, pad_mode="zeros")},
    )
    return RunSpec(recipe=recipe, variant=variant, data="digits", seed=3, out=out)


# ---- one life of a run, in a process of its own -------------------------------------------------


def live(out: Path, variant: Variant, way: str, rank: int, port: int, bell: int, phase: str, number: int) -> None:
    """Train or go on; ring the bell at the so-many-th entry into the phase, and be killed some time later."""
    fitting.CHECKPOINT_SECONDS = 0.0
    run_files.versions_of = dict  # type: ignore[assignment]  # it reads the packages' metadata, which is slow
    if way != "one":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    entries = [0]

    def ring() -> None:
        entries[0] += 1
        if entries[0] == number:
            os.write(bell, b"!")

    if phase == "anywhere":
        ring()
    else:
        watch(phase, ring)
    torch.manual_seed(0)
    fit([spec(out, variant, way)], device="cpu", resume=True)
    if way != "one":
        dist.barrier()
        dist.destroy_process_group()


def watch(phase: str, ring: Any) -> None:
    places: dict[str, list[tuple[Any, str]]] = {
        "data": [(DeviceBatches, "start_epoch"), (DeviceBatches, "advance")],
        "step": [(Run, "_loss")],
        "evaluation": [(Run, "evaluate")],
        "checkpoint": [
            (fitting, "save_run"),
            (tensor_file, "bytes_of"),
            (os, "replace"),
            (os, "rename"),
            (shutil, "rmtree"),
        ],
    }
    for owner, name in places[phase]:
        setattr(owner, name, ringing(getattr(owner, name), ring))


def ringing(plain: Any, ring: Any) -> Any:
    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        ring()
        return plain(*args, **kwargs)

    return called


def start(out: Path, variant: Variant, way: str, phase: str, number: int) -> tuple[list[int], int]:
    """Fork the processes of one life; their numbers, and the bell of the one to be killed."""
    listen, bell = os.pipe()
    port = free_port()
    children = []
    for rank in range(1 if way == "one" else 2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(listen)
                errors = os.open(out.with_name(f"{out.name}.{rank}.err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(errors, 2)
                rung = (
                    number if rank == 0 else 0
                )  # the leading process writes the files: it is the one to be killed
                live(out, variant, way, rank, port, bell, phase, rung)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    os.close(bell)
    return children, listen


def one_life(out: Path, variant: Variant, way: str, phase: str, number: int, delay: float) -> str:
    """`killed`, or `ended` if the run came to its end before the moment."""
    children, listen = start(out, variant, way, phase, number)
    killed = False
    try:
        if select.select([listen], [], [], 120)[0] and os.read(listen, 1):
            time.sleep(delay)
            os.kill(children[0], signal.SIGKILL)
            killed = True
            for child in children[1:]:  # as torchrun does with what is left
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(listen)
        statuses = [os.waitpid(child, 0)[1] for child in children]
    if os.WIFSIGNALED(statuses[0]) and os.WTERMSIG(statuses[0]) == signal.SIGKILL:
        return "killed"
    if any(statuses) and not killed:
        raise RuntimeError(out.with_name(f"{out.name}.0.err").read_text()[-1500:])
    return "ended"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# ---- the comparison -----------------------------------------------------------------------------


def differences(whole: Path, out: Path) -> list[str]:
    """What a resumed run has that the run never killed has not; times aside."""
    found = []
    for name in ("checkpoint.safetensors", "model.safetensors"):
        if (whole / name).exists() != (out / name).exists():
            found.append(f"{name} is there in one of the two")
        elif (whole / name).exists():
            found += unlike(tensors_of(whole / name), tensors_of(out / name))
    one, other = read_result(whole / "result.json"), read_result(out / "result.json")
    if [metrics(e) for e in one.epochs] != [metrics(e) for e in other.epochs] or not other.finished:
        found.append("the results differ")
    lines = (out / "log.jsonl").read_text().splitlines()
    if [json.loads(line)["epoch"] for line in lines] != list(range(1, EPOCHS + 1)):
        found.append("the log lacks an epoch")
    found += [f"{path.name} was left over" for path in out.iterdir() if path.name.startswith(".")]
    return found


def metrics(epoch: Any) -> tuple[float, ...]:
    return *epoch.measures.values(), epoch.lr


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    if one.keys() != other.keys():
        return [f"names differ: {sorted(one.keys() ^ other.keys())[:3]}"]
    return [f"{name} differs" for name, tensor in one.items() if not torch.equal(tensor, other[name])][:3]


def tensors_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return read_state(path)[0] if path.name.startswith("checkpoint") else load_file(path)


def trial(folder: Path, whole: Path, variant: Variant, way: str, random: Random, kills: int, count: Any) -> int:
    """One run killed up to so many times; how often it was."""
    out, done = folder / "run", 0
    shutil.rmtree(out, ignore_errors=True)
    for _ in range(40):
        if done < kills:
            phase = random.choice(PHASES)
            most = {"data": 8, "step": 8, "evaluation": 3, "checkpoint": 60, "anywhere": 1}[phase]
            late = {"anywhere": 1.0 if way == "one" else 3.0, "evaluation": 0.05}.get(phase, 0.01)
            outcome = one_life(out, variant, way, phase, random.randint(1, most), random.uniform(0, late))
        else:
            phase, outcome = "", one_life(out, variant, way, "step", 0, 0.0)
        if outcome == "ended":
            break
        done += 1
        count("kills", phase)
        count("kills by processes", {"one": "one process"}.get(way, f"two, {way}"))
    else:
        raise RuntimeError("the run never came to its end")
    found = differences(whole, out)
    if found:
        raise RuntimeError("; ".join(found))
    return done


def reference(folder: Path, variant: Variant, way: str) -> Path:
    """The run that is never killed."""
    whole = folder / f"whole-{variant.label}-{way}"
    if not whole.exists() and one_life(whole, variant, way, "step", 0, 0.0) != "ended":
        raise RuntimeError("the run to compare with was killed")
    return whole


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ledger = open_ledger("kills", total=100, seconds=900, seed=0, epochs=EPOCHS, batch_size=BATCH)
    with tempfile.TemporaryDirectory() as place:
        folder, number = Path(place), int(ledger.found.get("runs", 0))
        while ledger.open:
            random = Random(1000 + number)
            way, variant = WAYS[number % len(WAYS)], VARIANTS[number % len(VARIANTS)]
            try:
                whole = reference(folder, variant, way)
                kills = trial(folder, whole, variant, way, random, random.randint(1, 5), ledger.count)
                ledger.count("bit-equal runs")
            except Exception as error:
                kills = 1
                told = f"{type(error).__name__}: {error}"[-1500:]
                ledger.note("faults", {"run": number, "processes": way, "variant": variant.label, "error": told})
            number += 1
            ledger.found["runs"] = number
            for _ in range(kills):
                if ledger.done < ledger.total:
                    ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
