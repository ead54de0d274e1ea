"""A results file: one line of JSON for a finished measurement; what stands in it is not measured again."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KEY = ("kind", "subject", "net_seed", "method", "images", "seed", "budget", "test_images", "device")
Line = dict[str, Any]


class Results:
    """Lines by their key; a last line that was cut off is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[tuple[Any, ...], Line] = {}
        for line in read(path) if path.exists() else ():
            self.lines[key_of(line)] = line

    def get(self, **key: Any) -> Line | None:
        return self.lines.get(key_of(key))

    def add(self, line: Line) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a") as file:
            file.write(("" if whole else "\n") + json.dumps(line) + "\n")
        self.lines[key_of(line)] = line


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in KEY)


def read(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue


def command() -> str:
    """The command line, paths by their last part: they differ from machine to machine."""
    return shlex.join(["python", *(Path(part).name if "/" in part else part for part in sys.argv)])


def commit() -> str:
    """The commit of this file's repository, with a plus where tracked files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return "unknown"
