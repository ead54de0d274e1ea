"""Language modelling: predict the next word; the metric is perplexity, the exponential of the mean loss a word."""

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ReplearnError
from .. import data as datasets
from ..architectures import language_model
from ..data import TextSet
from ..metrics import Metric
from ..pretrained import load_pretrained_
from ..recipe import Recipe
from ..text_batches import TextBatches
from .base import Task, sums_of


class LanguageModelling(Task):
    name = "language_modelling"
    metric = Metric(name="perplexity", higher_is_better=False)
    sample = "tokens"

    batches: TextBatches

    def reading(self) -> tuple[Any, ...]:
        return (self.recipe.text.min_count,)

    def read(self) -> TextSet:
        loaded = datasets.load(self.spec.data, self.spec.data_root, min_count=self.recipe.text.min_count)
        found = datasets.expect(TextSet, loaded, self.name)
        return replace(found, train=found.train.to(self.device), test=found.test.to(self.device))

    def take(self, data: TextSet) -> None:
        length = self.recipe.text.sequence_length
        self.batches = TextBatches(data, self.processes, self.recipe.batch_size, length)
        self.shape = data.num_classes, 0, 0

    @staticmethod
    def fresh(recipe: Recipe, classes: int, channels: int, size: int) -> nn.Module:
        return language_model(recipe.model, num_words=classes, max_length=recipe.text.sequence_length)

    @staticmethod
    def inputs(recipe: Recipe, channels: int, size: int) -> Tensor:
        return torch.zeros(2, recipe.text.sequence_length, dtype=torch.int64)

    def start_(self, model: nn.Module, source: str) -> None:
        load_pretrained_(model, source, words=self.batches.num_words, name=self.recipe.model)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        words, targets = batch
        loss = model(words, targets)
        return loss, sums_of(loss, targets.numel())  # every window of training is full

    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        held = getattr(model, "words", None)  # on a GPU, wrong numbers of words raise no error
        if isinstance(held, nn.Embedding) and held.num_embeddings != self.batches.num_words:
            raise ReplearnError(
                f"The model's vocabulary has {held.num_embeddings:,} words, and this text gives "
                f"{self.batches.num_words:,}: use the text and the text.min_count that it was trained with."
            )
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for words, targets in self.batches.test():
            count = (targets >= 0).sum()
            with precision:
                loss = model(words, targets)
            sums += torch.stack([loss.double() * count, count.double()])
        loss_sum, count_sum = self.processes.total(sums).tolist()
        loss = loss_sum / count_sum
        return {"test_loss": loss, "test_perplexity": math.exp(loss) if loss < 700 else math.inf}

    @property
    def step_samples(self) -> int:
        return self.recipe.batch_size * self.recipe.text.sequence_length
