"""Where a run's batches come from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import ReplearnError
from .processes import Processes


class Batches(ABC):
    """One run's view of its training data: full batches of `count` samples (`what`) of the data set `name`.

    `fixed` says that batches arrive in the same tensors every time, `one_shape` that they are as large every time:
    then it pays to let cuDNN try its algorithms.
    """

    fixed = False
    one_shape = True

    def __init__(
        self, processes: Processes, device: torch.device, batch_size: int, count: int, what: str, name: str
    ) -> None:
        if batch_size % processes.world:
            raise ReplearnError(
                f"A batch of {batch_size} can't be divided among {processes.world} processes; "
                f"write a batch size that is a multiple of {processes.world}."
            )
        if count < batch_size:
            raise ReplearnError(
                f"A batch of {batch_size} is larger than {name}, which has {count} training {what}. Write a "
                "smaller batch_size."
            )
        self.processes, self.device, self.batch_size = processes, device, batch_size
        self.steps = count // batch_size  # in an epoch
        self.share = batch_size // processes.world  # of a batch, for each process
        self.place = (0, 0, 0)  # seed, epoch and step
        self._held: Any = None  # what was drawn for the step

    @abstractmethod
    def drawn(self, seed: int, epoch: int, first_step: int) -> Iterator[Any]:
        """This process's choices from a step on, which depend on (seed, epoch) alone; one tensor where `fixed`."""

    @abstractmethod
    def batch(self, held: Any) -> Any:
        """The batch that was chosen; part of what is captured."""

    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        self.place = seed, epoch, first_step
        self._stream = self.drawn(seed, epoch, first_step)

    def advance(self, step: int) -> None:
        """Go to a step's batch."""
        self.place = (*self.place[:2], step)
        chosen = next(self._stream)
        if self.fixed and self._held is not None:
            self._held.copy_(chosen)
        else:
            self._held = chosen.to(self.device, copy=True) if self.fixed else chosen

    def current(self) -> Any:
        """The batch of the step."""
        return self.batch(self._held)

    def split(self, rows: Tensor, first_step: int) -> Iterator[Tensor]:
        """This process's rows of each step, of those of an epoch."""
        steps = range(first_step * self.batch_size, self.steps * self.batch_size, self.batch_size)
        return (self.processes.share(rows[start : start + self.batch_size]) for start in steps)

    @abstractmethod
    def calibration(self, seed: int, samples: int) -> list[Any]:
        """Training samples as the model takes them, in batches, for fitting operators to a trained model."""

    @abstractmethod
    def test(self) -> Iterator[tuple[Any, Any]]:
        """This process's share of the test part, in batches; over all processes every sample comes once."""

    def share_of(self, count: int, size: int) -> Iterator[range]:
        """This process's places among so many, some at a time."""
        mine = range(self.processes.rank, count, self.processes.world)
        return (mine[start : start + size] for start in range(0, len(mine), size))
