"""A run's log: a line of JSON an epoch, and TensorBoard events where TensorBoard is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import Epoch, write_atomically

FORMAT = "replearn-log-1"


class RunLog:
    """Appends every epoch; a resumed run goes on in the same files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.jsonl"
        self._events = event_writer(folder / "tensorboard")

    def start(self, epochs: Sequence[Epoch]) -> None:
        """Begin with the epochs of the state that the run goes on from; a killed run's lines may be torn."""
        write_atomically(self.path, "".join(f"{line_of(epoch)}\n" for epoch in epochs))

    def epoch(self, epoch: Epoch) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line_of(epoch) + "\n")
        if self._events is not None:
            for name, value in epoch.to_dict().items():
                if name != "epoch":
                    self._events.add_scalar(name, value, epoch.epoch)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def line_of(epoch: Epoch) -> str:
    return json.dumps({"format": FORMAT, **epoch.to_dict()})


def event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # TensorBoard is optional; the JSON lines hold the same numbers
        return None
    return SummaryWriter(str(folder))
