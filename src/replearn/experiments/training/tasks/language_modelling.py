"""Language modelling: say the next word; judged by perplexity, the exponential of the mean loss a word."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....errors import ReplearnError
from .. import data as data_room
from ..architectures import language_model
from ..data import TextSet
from ..metrics import Metric
from ..pretrained import load_pretrained_
from ..processes import Processes
from ..text_batches import TextBatches
from .base import Task, sums_of

if TYPE_CHECKING:
    from ..run import RunSpec


class LanguageModelling(Task):
    name = "language_modelling"
    metric = Metric(name="perplexity", higher_is_better=False)
    sample = "tokens"

    batches: TextBatches

    @classmethod
    def open(
        cls, spec: RunSpec, device: torch.device, processes: Processes, shared: dict[Any, Any]
    ) -> LanguageModelling:
        task = cls(spec, device, processes)
        text = spec.recipe.text
        key = (spec.data, str(spec.data_root), text.min_count)
        if key not in shared:
            loaded = data_room.load(spec.data, spec.data_root, min_count=text.min_count)
            found = data_room.expect(TextSet, loaded, cls.name)
            shared[key] = replace(found, train=found.train.to(device), test=found.test.to(device))
        task.batches = TextBatches(shared[key], processes, spec.recipe.batch_size, text.sequence_length)
        return task

    def build(self) -> nn.Module:
        length = self.recipe.text.sequence_length
        model = language_model(self.recipe.model, num_words=self.batches.num_words, max_length=length)
        if self.spec.pretrained is not None:
            words, name = self.batches.num_words, self.recipe.model
            load_pretrained_(model, self.spec.pretrained, words=words, name=name)
        return model

    def example(self) -> Tensor:
        return torch.zeros(1, self.recipe.text.sequence_length, dtype=torch.int64, device=self.device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        words, targets = batch
        loss = model(words, targets)
        return loss, sums_of(loss, targets.numel())  # every window of training is full

    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        self.check_vocabulary(model)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for words, targets in self.batches.test(self.processes):
            count = (targets >= 0).sum()
            with precision:
                loss = model(words, targets)
            sums += torch.stack([loss.double() * count, count.double()])
        loss_sum, count_sum = self.processes.total(sums).tolist()
        loss = loss_sum / count_sum
        return {"test_loss": loss, "test_perplexity": math.exp(loss) if loss < 700 else math.inf}

    def check_vocabulary(self, model: nn.Module) -> None:
        """Refuse a model of another text: its words have other numbers, which a GPU would not even tell."""
        words = getattr(model, "words", None)
        if isinstance(words, nn.Embedding) and words.num_embeddings != self.batches.num_words:
            raise ReplearnError(
                f"The model's vocabulary has {words.num_embeddings:,} words, and this text gives "
                f"{self.batches.num_words:,}: use the text and the text.min_count that it was trained with."
            )

    @property
    def step_samples(self) -> int:
        return self.recipe.batch_size * self.recipe.text.sequence_length
