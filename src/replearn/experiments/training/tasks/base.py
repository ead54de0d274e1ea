"""Base class of tasks: data, model, loss and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import data as datasets
from ..batches import Batches
from ..metrics import Metric
from ..picture_batches import PictureBatches, PictureStore
from ..pretrained import start_backbone_
from ..processes import Processes
from ..recipe import Recipe

if TYPE_CHECKING:
    from ..run import RunSpec


class Task(ABC):
    """The task of one run: all that differs between tasks. `Run` has steps, seeds, checkpoints and files.

    A captured step runs `batches.current()` and `loss`, which then must have fixed shapes and tensors on the
    device and must not synchronize. Tasks whose batches change shape leave `batches.fixed` False.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]  # the one that rows are compared by
    also: ClassVar[tuple[Metric, ...]] = ()  # measured beside it
    sample: ClassVar[str] = "images"  # what is counted in speeds
    counted: ClassVar[tuple[str, ...]] = ()  # training sums between the loss's and the number of samples

    batches: Batches
    shape: tuple[int, int, int]  # classes, channels and side, as `fresh` takes them

    def __init__(self, spec: RunSpec, device: torch.device, processes: Processes, shared: dict[Any, Any]) -> None:
        self.spec, self.recipe, self.device, self.processes = spec, spec.recipe, device, processes
        key = (self.name, spec.data, str(spec.data_root), *self.reading())
        if key not in shared:
            shared[key] = self.read()
        self.take(shared[key])

    def reading(self) -> tuple[Any, ...]:
        """The settings that the result of `read` depends on."""
        return ()

    @abstractmethod
    def read(self) -> Any:
        """The data, on the device if it fits; runs at the same time share it."""

    @abstractmethod
    def take(self, data: Any) -> None:
        """Set `batches` and `shape`."""

    @staticmethod
    @abstractmethod
    def fresh(recipe: Recipe, classes: int, channels: int, size: int) -> nn.Module:
        """The recipe's model, before any method changes it."""

    @staticmethod
    @abstractmethod
    def inputs(recipe: Recipe, channels: int, size: int) -> Tensor:
        """Two made-up inputs."""

    @abstractmethod
    def start_(self, model: nn.Module, source: str) -> None:
        """Load trained weights into the model."""

    def build(self) -> nn.Module:
        """The model, pretrained where the recipe says so."""
        model = self.fresh(self.recipe, *self.shape)
        if self.spec.pretrained is not None:
            self.start_(model, self.spec.pretrained)
        return model

    def formatted(self, images: Tensor) -> Tensor:
        """Images in the memory format that the recipe asks for."""
        return images.contiguous(memory_format=torch.channels_last) if self.recipe.channels_last else images

    def example(self) -> Any:
        """One sample as the model takes it, for counting FLOPs."""
        return self.inputs(self.recipe, *self.shape[1:])[:1].to(self.device)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and its sums: the loss's, those in `counted`, the number of samples."""

    @abstractmethod
    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        """`test_loss` and every metric on the test set; in every process, in eval mode, without gradients."""

    def train_measures(self, sums: Sequence[float]) -> dict[str, float]:
        """The measures of an epoch from its sums, by their names in the result file; `train_loss` is one."""
        loss, *counted, samples = sums
        shares = {name: 100 * value / samples for name, value in zip(self.counted, counted, strict=True)}
        return {"train_loss": loss / samples, **shares}

    def notes(self) -> list[str]:
        """Notes for the result file on how the model was initialized."""
        return []

    @property
    def step_samples(self) -> int:
        """Samples in a step of all processes together."""
        return self.recipe.batch_size

    def parts(self, batch: Any, count: int) -> Iterator[Any]:
        """A batch cut into equal parts, for accumulating gradients."""
        return zip(*(tensor.chunk(count) for tensor in batch), strict=True)


def sums_of(loss: Tensor, samples: int, *counted: Tensor) -> Tensor:
    """The sums that `Task.loss` returns: a batch's loss, what is counted, the number of samples."""
    mean = loss.detach().float()
    return torch.stack([mean * samples, *counted, torch.full_like(mean, samples)])


class PictureTask(Task):
    """What detection and segmentation share: pictures on disk, and a backbone."""

    kind: ClassVar[Any]  # the class of its data sets
    batches_of: ClassVar[Any]  # the class of its batches

    batches: PictureBatches[Any]
    started: str = ""

    def read(self) -> Any:
        data = datasets.expect(self.kind, datasets.load(self.spec.data, self.spec.data_root), self.name)
        return data, [PictureStore(part, data.read, self.device) for part in (data.train, data.test)]

    def take(self, data: Any) -> None:
        self.batches = self.batches_of(*data, self.processes, self.recipe, self.device)
        self.shape = data[0].num_classes, 3, 0  # of any size

    def start_(self, model: nn.Module, source: str) -> None:
        self.started = start_backbone_(model, source)

    def notes(self) -> list[str]:
        return [self.started] if self.started else []
