"""A run's log: a line of JSON an epoch, and the same numbers wherever else its epochs go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .loggers import loggers_for
from .results import Epoch, write_atomically
from .run import Run

FORMAT = "replearn-log-1"


class RunLog:
    """Appends every epoch; a resumed run goes on in the same files."""

    def __init__(self, run: Run, logger: str | None) -> None:
        self.path: Path = run.spec.out / "log.jsonl"
        # the epochs of the state that the run goes on from: a killed run's lines may be torn
        write_atomically(self.path, "".join(f"{line_of(epoch)}\n" for epoch in run.epochs))
        self._loggers: list[Any] = loggers_for(logger, run.title, run.spec)

    def epoch(self, epoch: Epoch) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line_of(epoch) + "\n")
        values = {name: value for name, value in epoch.to_dict().items() if name != "epoch"}
        for logger in self._loggers:
            logger.epoch(values, epoch.epoch)

    def close(self) -> None:
        for logger in self._loggers:
            logger.end()


def line_of(epoch: Epoch) -> str:
    return json.dumps({"format": FORMAT, **epoch.to_dict()})
