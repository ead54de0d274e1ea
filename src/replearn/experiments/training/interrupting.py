"""Ctrl-C between steps: never in the middle of one, and in all processes at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from .processes import Processes

EVERY = 10  # steps between two moments at which many processes agree on stopping


class Interruption:
    """Remembers a Ctrl-C (or a SIGTERM, as schedulers send) until the step is done."""

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self.processes, self.device = processes, device
        self.asked = False
        self._steps = 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was asked for, in every process alike; call it between steps."""
        asked = self.asked
        if self.processes.world > 1:
            self._steps += 1
            if self._steps % EVERY:
                return
            flag = torch.tensor([float(asked)], device=self.device)
            asked = bool(self.processes.total(flag).item())
        if asked:
            raise KeyboardInterrupt


@contextmanager
def interruption(processes: Processes, device: torch.device) -> Iterator[Interruption]:
    """Turn signals into a request to stop; a second Ctrl-C stops at once, as ever."""
    state = Interruption(processes, device)
    if threading.current_thread() is not threading.main_thread():
        yield state  # signals reach the main thread alone
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        if state.asked:
            raise KeyboardInterrupt
        state.asked = True

    for number in before:
        signal.signal(number, ask)
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
