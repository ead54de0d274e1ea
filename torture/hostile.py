"""Hostile files: every one is refused with a ReplearnError, in bounded time and memory, and nothing in it is run.

    python -m torture.hostile

Every byte of a small checkpoint is changed (each in turn, two ways) and every length is cut; every byte of a run's
state likewise; then the crafted ones: swapped tensors, headers that lie, huge shapes, names that climb out of a
folder, JSON bombs, pickles and YAML under our names.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from torch import nn

import replearn
from replearn import ReplearnError
from replearn.experiments.training.state import read_state, write_state

from .crafted import crafted, small_model
from .ledger import open_ledger

SECONDS, MEMORY = 5.0, 1024  # that a refusal may take, in seconds and MiB


def model() -> nn.Module:
    return small_model()


def whole_file(folder: Path) -> Path:
    """A checkpoint of a few kilobytes."""
    made = model()
    replearn.replace_(made, replearn.plan(made, interval=2, first=2))
    path = folder / "whole.safetensors"
    replearn.save(made, path)
    return path


def state_file(folder: Path) -> Path:
    path = folder / "state.safetensors"
    torch.manual_seed(0)
    write_state(path, {"model/weight": torch.randn(5, 3), "optimizer/step": torch.tensor(3.0)}, {"epoch": 1})
    return path


def changed_bytes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Each byte with its lowest bit turned, and with all of them."""
    for place in range(len(data)):
        for mask in (0x01, 0xFF):
            yield f"byte {place} ^ {mask}", data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


def cut(data: bytes) -> Iterator[tuple[str, bytes]]:
    for length in range(0, len(data), 7):
        yield f"cut to {length}", data[:length]
    yield "longer", data + b"\0" * 8
    yield "doubled", data + data


def check(load: Callable[[], object], what: str, before: float) -> str | None:
    """None if it was refused well; else what went wrong."""
    begin = time.perf_counter()
    try:
        load()
        return f"{what}: accepted"
    except ReplearnError as error:
        if len(str(error)) > 2000:
            return f"{what}: a message of {len(str(error))} characters"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {str(error)[:200]}"
    if time.perf_counter() - begin > SECONDS:
        return f"{what}: took {time.perf_counter() - begin:.1f} s"
    if peak() - before > MEMORY:
        return f"{what}: took {peak() - before:.0f} MiB"
    return None


def peak() -> float:
    """The most memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        good, state = whole_file(folder).read_bytes(), state_file(folder).read_bytes()
        file, random, fresh = folder / "hostile.safetensors", Random(0), model()
        cases = [("checkpoint, bytes", *case) for case in changed_bytes(good)]
        cases += [("checkpoint, cut", *case) for case in cut(good)]
        cases += [("run's state, bytes", *case) for case in changed_bytes(state)]
        cases += [("run's state, cut", *case) for case in cut(state)]
        random.shuffle(cases)
        made = list(crafted(folder, good))
        ledger = open_ledger(
            "hostile", len(cases) + len(made), 600, checkpoint_bytes=len(good), state_bytes=len(state)
        )
        before = peak()
        while ledger.open:
            if ledger.done < len(cases):
                kind, what, data = cases[ledger.done]
                file.write_bytes(data)
                load = (
                    (lambda: read_state(file)) if kind.startswith("run") else (lambda: replearn.load(fresh, file))
                )
            else:
                kind, what, load = made[ledger.done - len(cases)]
            fault = check(load, what, before)
            ledger.count("refused" if fault is None else "not refused", kind)
            if fault:
                ledger.note("faults", fault)
            ledger.finish_case()
        ledger.found["peak_mib"] = round(peak() - before)
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
