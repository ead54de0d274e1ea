"""Where a run's batches come from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import ReplearnError
from .processes import Processes


class Batches(ABC):
    """The batches of one run, from `count` samples (`what`) of the data set `name`.

    `fixed`: every batch is in the same tensors, so that steps can be captured. `one_shape`: all batches have one
    shape, so that cuDNN's benchmark mode pays.
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
        self.share = batch_size // processes.world  # samples of a batch in each process
        self.place = (0, 0, 0)  # seed, epoch and step
        self._chosen: Any = None  # what was drawn for the step

    @abstractmethod
    def drawn(self, seed: int, epoch: int, first_step: int) -> Iterator[Any]:
        """This process's choice of samples for each step, by (seed, epoch) alone; a tensor where `fixed`."""

    @abstractmethod
    def batch(self, chosen: Any) -> Any:
        """The batch with these samples; part of a captured step."""

    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        self.place = seed, epoch, first_step
        self._stream = self.drawn(seed, epoch, first_step)

    def advance(self, step: int) -> None:
        """Go to a step's batch."""
        self.place = (*self.place[:2], step)
        chosen = next(self._stream)
        if self.fixed and self._chosen is not None:
            self._chosen.copy_(chosen)
        else:
            self._chosen = chosen.to(self.device, copy=True) if self.fixed else chosen

    def current(self) -> Any:
        """The batch of the step."""
        return self.batch(self._chosen)

    def split(self, rows: Tensor, first_step: int) -> Iterator[Tensor]:
        """An epoch's rows, split into this process's rows of each step."""
        steps = range(first_step * self.batch_size, self.steps * self.batch_size, self.batch_size)
        return (self.processes.share(rows[start : start + self.batch_size]) for start in steps)

    @abstractmethod
    def calibration(self, seed: int, samples: int) -> list[Any]:
        """Training samples as the model takes them, in batches, for fitting operators to a trained model."""

    @abstractmethod
    def test(self) -> Iterator[tuple[Any, Any]]:
        """This process's share of the test part, in batches; all processes together see every sample once."""

    def share_of(self, count: int, size: int) -> Iterator[range]:
        """This process's indices among `count`, `size` at a time."""
        mine = range(self.processes.rank, count, self.processes.world)
        return (mine[start : start + size] for start in range(0, len(mine), size))
