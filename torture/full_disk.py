"""A disk that fills up while a checkpoint is written: the last good one stays, and the run goes on bit-equal.

    python -m torture.full_disk

The disk is a tmpfs of a few hundred kilobytes with a filler of another size in every case (as root); where none
can be mounted, a limit on the size of files stands for it. A process is forked for each run.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

from replearn import ReplearnError
from replearn.experiments.training import fit as fitting
from replearn.experiments.training.fit import fit
from replearn.experiments.training.state import read_state

from .kills import VARIANTS, differences, reference, spec
from .ledger import open_ledger

SIZE = 600 * 1024


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of SIZE bytes at the folder, if this user may mount one."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def in_a_fork(work: object) -> int:
    """Run this in a process of its own; its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(work())  # type: ignore[operator]
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def trial(folder: Path, whole: Path, seed: int) -> str:
    """One run that meets a full disk; 'full' if it did, 'fits' if there was room after all."""
    random = Random(seed)
    with small_disk(folder / "disk") as mounted:
        out, filler = folder / "disk" / "run", folder / "disk" / "filler"

        def train(room: int | None) -> int:
            fitting.CHECKPOINT_SECONDS = 0.0
            if room is not None and not mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            try:
                fit([spec(out, VARIANTS[0], "one")], device="cpu", resume=True)
            except ReplearnError as error:
                return 3 if "Can't " in str(error) and "untouched" in str(error) else 4
            return 0

        room = random.randrange(2_000, 250_000)
        if mounted:
            filler.write_bytes(b"0" * (SIZE - room))
        status = in_a_fork(lambda: train(room))
        if status not in (0, 3):
            raise RuntimeError(f"with {room:,} bytes left it ended with {status}")
        left = [path.name for path in out.iterdir() if path.name.startswith(".")]
        if left:
            raise RuntimeError(f"{left} were left over")
        if (out / "checkpoint.safetensors").exists():
            read_state(out / "checkpoint.safetensors")  # the last good one, whole
        filler.unlink(missing_ok=True)
        if in_a_fork(lambda: train(None)):
            raise RuntimeError("the run did not go on after there was room again")
        if found := differences(whole, out):
            raise RuntimeError("; ".join(found))
    return "full" if status else "fits"


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ledger = open_ledger("full_disk", total=12, seconds=300, seed=0)
    with tempfile.TemporaryDirectory() as place:
        whole = reference(Path(place), VARIANTS[0], "one")
        while ledger.open:
            try:
                ledger.count("runs", trial(Path(place), whole, ledger.done))
            except Exception as error:
                ledger.note("faults", f"seed {ledger.done}: {error}")
            ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
