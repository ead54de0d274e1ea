"""One file from an http address: resumed when the connection is cut, checked, and only then put in place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from io import FileIO
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ....errors import ReplearnError
from .inspection import md5_of

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try: attempts in all, seconds without a byte, seconds before the second one (then doubled)."""

    attempts: int = 5
    timeout: float = 30.0
    pause: float = 1.0


PATIENT = Patience()


class _Interrupted(Exception):
    """Worth another attempt."""


def fetch(
    url: str, target: Path, md5: str, patience: Patience = PATIENT, progress: Progress | None = None
) -> bool:
    """Bring a file to `target`; False if the right one was there already.

    A transfer that was cut goes on where it stopped, also in a later call. A wrong file already at
    `target` is kept beside it, as NAME.old, once the right one has arrived.
    """
    if not url.startswith(("http://", "https://")):
        raise ReplearnError(f"{url} is no address to fetch from; write one that starts with http:// or https://.")
    if md5_of(target) == md5:
        return False
    part = target.with_name(f".{target.name}.part")
    with _opened_alone(part) as file:
        why = "no attempt was allowed"
        for attempt in range(patience.attempts):
            if attempt:
                time.sleep(min(60.0, patience.pause * 2 ** (attempt - 1)))
            begin = file.seek(0, os.SEEK_END)
            try:
                _transfer(url, file, target, patience.timeout, progress)
            except _Interrupted as interruption:
                why = str(interruption)
                continue
            found = md5_of(part)
            if found == md5:
                os.fsync(file.fileno())
                put_in_place(part, target)
                return True
            why = f"what arrived has the md5 {found}, and {md5} is expected"
            file.truncate(0)
            if not begin:  # in one piece and still wrong: another attempt would bring the same
                raise ReplearnError(
                    f"{url} gave a wrong file: {why}. It was thrown away; nothing else was touched. Try again "
                    f"later, or put the right file at {target} by hand."
                )
        kept = file.seek(0, os.SEEK_END)
    raise ReplearnError(
        f"{url} could not be fetched in {patience.attempts} attempts: {why}. "
        + (f"{kept:,} bytes are kept in {part}, and the same command goes on from there. " if kept else "")
        + f"Without a network, bring the file by hand and put it at {target}."
    )


def _transfer(url: str, file: FileIO, target: Path, timeout: float, progress: Progress | None) -> None:
    """Add to the open file what it still lacks."""
    have = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "replearn", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urlopen(Request(url, headers=headers), timeout=timeout) as answer:
            if have and answer.status != 206:  # it can't resume: here comes the whole
                have = 0
                file.truncate(0)
            total = None if answer.length is None else have + answer.length
            while chunk := answer.read1(1 << 20):  # read1: a slow server is seen to be alive
                _write(file, chunk, target)
                have += len(chunk)
                if progress is not None:
                    progress(target.name, have, total)
            if total is not None and have < total:
                raise _Interrupted(f"the connection was cut after {have:,} of {total:,} bytes")
    except HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing is left to send: the checksum decides
            return
        if error.code < 500 and error.code not in (408, 425, 429):
            raise ReplearnError(
                f"{url} answered {error.code} ({error.reason}): the file is not to be had there. Look for a "
                f"mirror, or put the file at {target} by hand."
            ) from error
        raise _Interrupted(f"the server answered {error.code} ({error.reason})") from error
    except (OSError, HTTPException) as error:  # URLError, timeouts and resets are OSErrors
        raise _Interrupted(str(error) or type(error).__name__) from error


def _write(file: FileIO, chunk: bytes, target: Path) -> None:
    rest = memoryview(chunk)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise ReplearnError(
            f"Can't write the download of {target}: {error}. Make room there, or choose another root."
        ) from error


@contextmanager
def _opened_alone(part: Path) -> Iterator[FileIO]:
    """The unfinished file, open for this process only: two that write to it would spoil it."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(part, "a+")  # unbuffered: a full disk is told here, not when it is closed
    except OSError as error:
        raise ReplearnError(f"Can't write to {part.parent}: {error}. Choose another root.") from error
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such lock on this system
            pass
        except OSError as error:
            raise ReplearnError(f"Another process is fetching {part}; wait for it to end.") from error
        try:
            yield file
        finally:
            if not os.fstat(file.fileno()).st_size:  # nothing to go on from
                part.unlink(missing_ok=True)


def put_in_place(new: Path, target: Path) -> None:
    """Move a finished file to its place at once; one that was there is kept as NAME.old."""
    try:
        if target.exists():
            os.replace(target, target.with_name(f"{target.name}.old"))
        os.replace(new, target)
    except OSError as error:
        raise ReplearnError(f"Can't put {target} in place: {error}. The new file is {new}.") from error
