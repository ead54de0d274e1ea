"""Train runs, one or several at a time on one device, to their end."""

import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from ...costs.precision import float32_products
from ...errors import ReplearnError
from ...planning.serialization import encode
from .log import logs_of, module_of
from .processes import Interruption, Processes, start_processes
from .recipe import FORMAT as RECIPE
from .results import SHARED, Epoch, Result, write_atomically
from .run import Run, RunSpec
from .run_files import locked, result_of, resume_run, save_run, write_model, write_result
from .state import remove_leftovers
from .step import many_graphs
from .tasks import task_named

CHECKPOINT_SECONDS = 60.0


class Progress(Protocol):
    """Callbacks of `fit`, by which the command line shows bars or lines."""

    def begin(self, runs: Sequence[str]) -> None: ...
    def step(self, run: int, epoch: int, step: int, steps: int, images_per_second: float, memory: int) -> None: ...
    def epoch(self, run: int, epoch: Epoch) -> None: ...
    def note(self, run: int, text: str) -> None: ...
    def end(self) -> None: ...


class Interrupted(ReplearnError):
    """Training was interrupted (Ctrl-C); the message names the checkpoint to resume from."""


def fit(
    specs: Sequence[RunSpec],
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Progress | None = None,
    deterministic: bool = False,
    shared: dict[Any, Any] | None = None,
    logger: str | None = None,
) -> list[Result]:
    """Train every run to its end, all of them at the same time on one device, and return their results.

    Each run's folder gets `recipe.json`, `log.jsonl`, `checkpoint.safetensors` and `result.json`. With
    `resume=True` a run continues from its checkpoint, and a finished one is only read. Under torchrun each process
    trains its share of every batch. With the same dict as `shared` in several calls, data is read once and stays
    on the device. `logger` is wandb, mlflow or tensorboard, which get every epoch too.
    """
    if not specs:
        raise ReplearnError("There is nothing to train: give at least one run (one method and one seed).")
    if logger is not None:
        module_of(logger)  # raises before anything is trained
    where = device_named(device)
    processes = start_processes(where)
    if where.type == "cuda":
        gc.collect()  # models have reference cycles, and those of earlier runs would count as this one's memory
    shared = {} if shared is None else shared
    with settings(specs[0], deterministic), ExitStack() as held:
        # before any folder is made: missing data leaves no folders behind
        tasks = [task_named(spec.recipe.task)(spec, where, processes, shared) for spec in specs]
        for spec in specs:
            spec.out.mkdir(parents=True, exist_ok=True)
            if processes.leads:
                held.enter_context(locked(spec.out))
        runs = []
        for spec, task in zip(specs, tasks, strict=True):
            runs.append(Run(spec, task, where, processes))
            if processes.leads:
                remove_leftovers(spec.out)
        if not all(run.batches.one_shape for run in runs):
            torch.backends.cudnn.benchmark = False  # it would search again for each new size
        processes.agree(True, where)  # no process looks for a checkpoint before leftovers are removed
        with Interruption(processes, where) as stop:
            return _train(runs, where, processes, progress, resume, stop, logger)


def _train(
    runs: list[Run],
    device: torch.device,
    processes: Processes,
    progress: Progress | None,
    resume: bool,
    stop: Interruption,
    logger: str | None,
) -> list[Result]:
    for run in runs:
        if not (resume and resume_run(run)) and processes.leads:
            about = {"format": RECIPE, **encode(run.spec.recipe)}
            write_atomically(run.spec.out / "recipe.json", json.dumps(about, indent=1))
    logs = {run: logs_of(run, logger) if processes.leads else [] for run in runs}
    results = {run: result_of(run) for run in runs if run.finished}
    together = [run for run in runs if not run.finished]
    for run in together if len(together) > 1 else []:
        run.note(SHARED)
    streams = streams_for(len(runs), device)
    reporter = progress if processes.leads else None
    if reporter:
        reporter.begin([run.title for run in runs])
    saved = time.monotonic()
    try:
        while active := [run for run in runs if not run.finished]:
            _epoch(active, runs, streams, device, reporter, stop)
            last = all(run.finished for run in active)
            due = time.monotonic() - saved > CHECKPOINT_SECONDS
            save = last or processes.agree(due, device)  # clocks differ, and saving takes all processes
            for run in active:
                values = run.epochs[-1].to_dict()
                number = values.pop("epoch")
                for log in logs[run]:
                    log.epoch(values, number)
                if reporter:
                    reporter.epoch(runs.index(run), run.epochs[-1])
                if run.finished:
                    write_model(run)
                results[run] = write_result(run)
                if save or run.finished:  # last, so that a finished state always has its model and result
                    save_run(run)
            if save:
                saved = time.monotonic()
    except KeyboardInterrupt:
        for run in runs:
            save_run(run)
        places = ", ".join(str(run.checkpoint) for run in runs)
        raise Interrupted(f"Interrupted; resume from {places}.") from None
    finally:
        for log in (log for held in logs.values() for log in held):
            log.end()
        if reporter:
            reporter.end()
    return [results[run] for run in runs]


def _epoch(
    active: list[Run],
    runs: list[Run],
    streams: list[Any],
    device: torch.device,
    reporter: Progress | None,
    stop: Interruption,
) -> None:
    """One epoch of every run, alternating step by step, so that small models share the device."""
    for run in active:
        run.start_epoch()
    synchronize(device)
    begin = time.perf_counter()
    shown, taken, first = begin, 0, min(run.step_in_epoch for run in active)
    for step in range(first, max(run.steps_per_epoch for run in active)):
        for run in active:
            if run.step_in_epoch <= step < run.steps_per_epoch:
                stream = streams[runs.index(run)]
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    run.step()
                taken += run.task.step_samples
        stop.check()
        if reporter and (now := time.perf_counter()) - shown > 0.2:
            shown = now
            memory = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            for run in active:
                speed = taken / len(active) / (now - begin)
                reporter.step(runs.index(run), run.epoch + 1, step + 1, run.steps_per_epoch, speed, memory)
    synchronize(device)
    seconds = time.perf_counter() - begin
    for run in active:
        if reporter:
            for note in run.notes:
                reporter.note(runs.index(run), note)
        run.step_ms = 1000 * seconds / max(1, run.steps_per_epoch - first)
        run.end_epoch(seconds)


def device_named(name: str) -> torch.device:
    """The device by name; `auto` takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ReplearnError(f"There is no device {name!r}; write cpu, cuda or cuda:0.") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ReplearnError("There is no GPU here that torch can use; write device='cpu'.")
        count = torch.cuda.device_count()
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0")) % count
        if index >= count:
            raise ReplearnError(f"There is no device {name!r}: this machine has {count} GPU(s), counted from 0.")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ReplearnError(f"Training runs on cpu or cuda, not on {name!r}.")
    return device


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def streams_for(runs: int, device: torch.device) -> list[Any]:
    """A stream for each of several runs that share a GPU; the same streams in later calls."""
    alone = runs == 1 or device.type != "cuda"
    return [None if alone else _stream(device, number) for number in range(runs)]


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    # cuBLAS keeps memory for every stream that it ever worked on
    return torch.cuda.Stream(device)


@contextmanager
def settings(spec: RunSpec, deterministic: bool) -> Iterator[None]:
    """Inside, precision and determinism are the recipe's; then they are restored."""
    algorithms = torch.get_deterministic_debug_mode()
    tf32, graphs = spec.recipe.precision != "float32", many_graphs() if spec.recipe.compile else nullcontext()
    with float32_products(tf32=tf32, benchmark=not deterministic), graphs:
        torch.use_deterministic_algorithms(deterministic)
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(algorithms)
