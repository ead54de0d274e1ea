"""A trial's file: what was tried so far, so that a stopped trial goes on where it was."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replearn.experiments.training.results import hardware_of, now, versions_of, write_atomically

FORMAT = "replearn-torture-1"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@dataclass
class Ledger:
    """Counts and faults of one trial in benchmarks/results/torture_NAME.json; it holds `done` of `total` cases."""

    path: Path
    total: int
    settings: dict[str, Any]
    seconds: float
    done: int = 0
    found: dict[str, Any] = field(default_factory=dict)
    spent: float = 0.0
    started: str = ""
    _begin: float = field(default_factory=time.monotonic)
    _written: float = 0.0

    @property
    def open(self) -> bool:
        """Is there something left to try, and time to try it?"""
        return self.done < self.total and time.monotonic() - self._begin < self.seconds

    def count(self, *path: str, by: int = 1) -> None:
        """Add to a count, as `count("outcomes", "refused")`."""
        place = self.found
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = place.get(path[-1], 0) + by

    def note(self, name: str, entry: Any) -> None:
        """Add to a list: a fault, with what is needed to see it again."""
        self.found.setdefault(name, []).append(entry)

    def finish_case(self) -> None:
        """One case more is tried; written once a second, and at the end."""
        self.done += 1
        if time.monotonic() - self._written > 1 or self.done == self.total:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        data = {
            "format": FORMAT,
            "command": f"python -m torture.{self.path.stem.removeprefix('torture_')}",
            "settings": self.settings,
            "total": self.total,
            "done": self.done,
            "finished": self.done >= self.total,
            "seconds": round(self.spent + time.monotonic() - self._begin, 1),
            "started": self.started or now(),
            "versions": versions_of(),
            "hardware": hardware_of(torch.device("cpu")),
            "found": self.found,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(data, indent=1) + "\n")

    def report(self) -> int:
        """Write and print; the exit status says whether a fault was found or cases are left."""
        self.write()
        print(json.dumps(self.found, indent=1)[:4000])
        print(f"{self.path.name}: {self.done} of {self.total}, {len(self.found.get('faults', []))} faults")
        return int(bool(self.found.get("faults")) or self.done < self.total)


def open_ledger(name: str, total: int, seconds: float, **settings: Any) -> Ledger:
    """The trial's ledger, by the command line: --total, --seconds, --out, and --fresh to start anew."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--total", type=int, default=total)
    arguments.add_argument("--seconds", type=float, default=seconds, help="stop after so long; go on next time")
    arguments.add_argument("--out", type=Path, default=RESULTS / f"torture_{name}.json")
    arguments.add_argument("--fresh", action="store_true", help="forget what was tried before")
    given = arguments.parse_args()
    ledger = Ledger(given.out, given.total, settings, given.seconds, started=now())
    if given.out.exists() and not given.fresh:
        before = json.loads(given.out.read_text(encoding="utf-8"))
        same = before["settings"] == settings and before["total"] == given.total
        if same and not before["finished"]:
            ledger.done, ledger.found = before["done"], before["found"]
            ledger.spent, ledger.started = before["seconds"], before["started"]
    return ledger
