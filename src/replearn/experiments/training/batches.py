"""Where a run's batches come from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from ...errors import ReplearnError
from .processes import Processes


class Batches(ABC):
    """One run's view of its training data: full batches of `count` samples (`what`) of the data set `name`.

    `fixed` says that batches arrive in the same tensors every time, `one_shape` that they are as large every time:
    then it pays to let cuDNN try its algorithms.
    """

    fixed = False
    one_shape = True

    def __init__(self, processes: Processes, batch_size: int, count: int, what: str, name: str) -> None:
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
        self.processes, self.batch_size = processes, batch_size
        self.steps = count // batch_size  # in an epoch
        self.share = batch_size // processes.world  # of a batch, for each process

    @abstractmethod
    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        """Draw the epoch, which depends on (seed, epoch) alone."""

    @abstractmethod
    def advance(self, step: int) -> None:
        """Go to a step's batch."""

    @abstractmethod
    def current(self) -> Any:
        """The batch of the step; part of what is captured."""

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
