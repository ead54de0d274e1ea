"""One file from an http address: tried again when the connection is cut, checked, and only then put in place."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO
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

    A wrong file already at `target` is kept beside it, as NAME.old, once the right one has arrived.
    """
    if not url.startswith(("http://", "https://")):
        raise ReplearnError(f"{url} is no address to fetch from; write one that starts with http:// or https://.")
    if md5_of(target) == md5:
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        raise ReplearnError(f"Can't write to {target.parent}: {error}. Choose another root.") from error
    part, why = Path(name), "no attempt was allowed"
    try:
        with os.fdopen(handle, "wb") as file:
            for attempt in range(patience.attempts):
                if attempt:
                    time.sleep(min(60.0, patience.pause * 2 ** (attempt - 1)))
                try:
                    _transfer(url, file, target, patience.timeout, progress)
                except _Interrupted as interruption:
                    why = str(interruption)
                    continue
                if (found := md5_of(part)) != md5:
                    raise ReplearnError(
                        f"{url} gave a wrong file: it has the md5 {found}, and {md5} is expected. It was thrown "
                        f"away; nothing else was touched. Try again later, or put it at {target} by hand."
                    )
                os.fsync(file.fileno())
                os.chmod(part, 0o644)
                put_in_place(part, target)
                return True
    finally:
        part.unlink(missing_ok=True)
    raise ReplearnError(
        f"{url} could not be fetched in {patience.attempts} attempts: {why}. Without a network, bring the file by "
        f"hand and put it at {target}."
    )


def _transfer(url: str, file: IO[bytes], target: Path, timeout: float, progress: Progress | None) -> None:
    """Write the whole answer into the open file."""
    file.seek(0)
    file.truncate()
    headers = {"User-Agent": "replearn", "Accept-Encoding": "identity"}
    have = 0
    try:
        with urlopen(Request(url, headers=headers), timeout=timeout) as answer:
            total = answer.length
            while chunk := answer.read1(1 << 20):  # read1: a slow server is seen to be alive
                _write(file, chunk, target)
                have += len(chunk)
                if progress is not None:
                    progress(target.name, have, total)
            if total is not None and have < total:
                raise _Interrupted(f"the connection was cut after {have:,} of {total:,} bytes")
    except HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in (408, 425, 429):
            raise ReplearnError(
                f"{url} answered {error.code} ({error.reason}): the file is not to be had there. Look for a "
                f"mirror, or put the file at {target} by hand."
            ) from error
        raise _Interrupted(f"the server answered {error.code} ({error.reason})") from error
    except (OSError, HTTPException) as error:  # URLError, timeouts and resets are OSErrors
        raise _Interrupted(str(error) or type(error).__name__) from error
    _write(file, b"", target)


def _write(file: IO[bytes], chunk: bytes, target: Path) -> None:
    try:
        file.write(chunk)
        file.flush()
    except OSError as error:
        raise ReplearnError(
            f"Can't write the download of {target}: {error}. Make room there, or choose another root."
        ) from error


def put_in_place(new: Path, target: Path) -> None:
    """Move a finished file to its place at once; one that was there is kept as NAME.old."""
    try:
        if target.exists():
            os.replace(target, target.with_name(f"{target.name}.old"))
        os.replace(new, target)
    except OSError as error:
        raise ReplearnError(f"Can't put {target} in place: {error}. The new file is {new}.") from error
