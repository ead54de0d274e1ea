"""Batches of a text on the device: windows of equal length, in a new order every epoch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...errors import ReplearnError
from .batches import Batches
from .data import IGNORED, TextSet
from .processes import Processes
from .seeds import seed_at

CALIBRATION = 32  # windows in a calibration batch
TEST = 64  # windows in a test batch


class TextBatches(Batches):
    """Windows of `length` words and, as targets, the word after each; an epoch's cuts begin at a random word."""

    fixed = True

    def __init__(self, text: TextSet, processes: Processes, batch_size: int, length: int) -> None:
        held = text.num_train
        for part, count in (("training", held), ("test", text.num_test)):
            if count < 2:
                raise ReplearnError(
                    f"The {part} text of {text.name} has {count} word or line end, and no word to say after "
                    "it. Use another text."
                )
        if length < 1 or held < 2 * length:
            raise ReplearnError(
                f"Sequences of {length} words can't be cut from {text.name}, which has {held:,}; write a "
                f"text.sequence_length from 1 to {held // 2}."
            )
        device = text.train.device
        self.windows = (held - length) // length  # whole ones, wherever the first begins
        super().__init__(processes, device, batch_size, self.windows, f"sequences of {length} words", text.name)
        self.text, self.length = text, length
        self.num_words = text.num_classes
        self._offsets = torch.arange(length + 1, device=device)

    def drawn(self, seed: int, epoch: int, first_step: int) -> Iterator[Tensor]:
        return self.split(self.starts(seed, epoch).to(self.device), first_step)

    def starts(self, seed: int, epoch: int) -> Tensor:
        """Where the windows of an epoch begin, in training order."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        first = torch.randint(self.length, (1,), generator=generator)
        return first + self.length * torch.randperm(self.windows, generator=generator)

    def batch(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.text.train[starts[:, None] + self._offsets]
        return windows[:, :-1], windows[:, 1:]

    def calibration(self, seed: int, samples: int) -> list[Tensor]:
        starts = self.starts(seed, -1)[:samples].to(self.device)
        return [self.batch(part)[0] for part in starts.split(CALIBRATION)]

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The test text from its first word to its last, each predicted once; what fills up is IGNORED."""
        stream = self.text.test
        for part in self.share_of(-(-(len(stream) - 1) // self.length), TEST):
            places = self.length * torch.tensor(part, device=stream.device)[:, None] + self._offsets
            words = stream[places.clamp(max=len(stream) - 1)]
            yield words[:, :-1], torch.where(places < len(stream), words, IGNORED)[:, 1:]
