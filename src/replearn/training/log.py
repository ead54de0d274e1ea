"""A run's log: a line of JSON an epoch, and TensorBoard events where TensorBoard is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .results import Epoch


class RunLog:
    """Appends every epoch; a resumed run goes on in the same files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.jsonl"
        self._events = event_writer(folder / "tensorboard")

    def start(self, kept: int) -> None:
        """Keep the lines of the first `kept` epochs and drop any that a stopped run wrote after them."""
        lines = self.path.read_text(encoding="utf-8").splitlines()[:kept] if kept and self.path.exists() else []
        self.path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def epoch(self, epoch: Epoch) -> None:
        values = epoch.to_dict()
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self._events is not None:
            for name, value in values.items():
                if name != "epoch":
                    self._events.add_scalar(name, value, epoch.epoch)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # TensorBoard is optional; the JSON lines hold the same numbers
        return None
    return SummaryWriter(str(folder))
