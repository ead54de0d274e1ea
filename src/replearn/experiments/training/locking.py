"""One process for each run's folder: a second one is told who trains there."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...errors import ReplearnError
from .results import now

NAME = "lock"


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Hold the folders until the end of the block; the system lets go of them when the process ends.

    ReplearnError with the holder's process and host where another one holds a folder.
    """
    with ExitStack() as held:
        for folder in folders:
            held.enter_context(_lock(folder))
        yield


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with open(folder / NAME, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read(200).strip() or "another process"
            raise ReplearnError(
                f"{folder} is being trained by {who}. Wait for it, stop it, or choose another folder with --out."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {now()}")
        file.flush()
        yield
