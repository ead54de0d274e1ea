"""What a task is: what a batch holds, how the model is made, the loss, and what is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import data as data_room
from ..batches import Batches
from ..data.scenes import Defects
from ..examples import write_examples
from ..metrics import Metric
from ..picture_batches import PictureBatches, Pictures
from ..picture_store import PictureStore
from ..pretrained import start_backbone_
from ..processes import Processes

if TYPE_CHECKING:
    from ..run import RunSpec

EXAMPLES = 4  # test pictures that a finished run draws


class Task(ABC):
    """One run's task. The engine owns steps, seeds, checkpoints and files; all that differs between tasks is here.

    A step that is captured as a CUDA graph runs `batches.current()` and `loss`: fixed shapes, tensors on the
    device, nothing that waits for it. Tasks whose batches change shape leave `batches.fixed` False.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]  # the one that rows are compared by
    also: ClassVar[tuple[Metric, ...]] = ()  # measured beside it
    sample: ClassVar[str] = "images"  # what is counted in speeds
    counted: ClassVar[tuple[str, ...]] = ()  # training sums between the loss's and the number of samples

    batches: Batches

    def __init__(self, spec: RunSpec, device: torch.device, processes: Processes) -> None:
        self.spec, self.recipe, self.device, self.processes = spec, spec.recipe, device, processes

    @classmethod
    @abstractmethod
    def open(cls, spec: RunSpec, device: torch.device, processes: Processes, shared: dict[Any, Any]) -> Task:
        """The task with its data; what `shared` holds already is on the device for several runs at once."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, before any method changes it, pretrained where the recipe says so."""

    @abstractmethod
    def example(self) -> Any:
        """One sample as the model takes it, for counting FLOPs."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and its sums: the loss's, those in `counted`, the number of samples."""

    @abstractmethod
    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        """`test_loss` and every metric on the test set; in every process, in eval mode, without gradients."""

    def train_measures(self, sums: Sequence[float]) -> dict[str, float]:
        """What an epoch's sums come to, by the names of the result file; `train_loss` is one of them."""
        loss, *counted, samples = sums
        shares = {name: 100 * value / samples for name, value in zip(self.counted, counted, strict=True)}
        return {"train_loss": loss / samples, **shares}

    def notes(self) -> list[str]:
        """What a result file should say of the data and of how the model was started."""
        return []

    def keep(self, model: nn.Module, precision: AbstractContextManager[Any]) -> None:  # noqa: B027 - may stay empty
        """Write what the task has to show into the run's folder once it is finished; in the leading process."""

    @property
    def step_samples(self) -> int:
        """Samples in a step of all processes together."""
        return self.recipe.batch_size

    def parts(self, batch: Any, count: int) -> Iterator[Any]:
        """A batch cut into equal parts, for accumulating gradients."""
        return zip(*(tensor.chunk(count) for tensor in batch), strict=True)


def sums_of(loss: Tensor, samples: int, *counted: Tensor) -> Tensor:
    """What `Task.loss` adds up: a batch's loss, what is counted, the number of samples."""
    mean = loss.detach().float()
    return torch.stack([mean * samples, *counted, torch.full_like(mean, samples)])


class PictureTask(Task):
    """What detection and segmentation share: pictures on disk, of which some may be broken, and a backbone."""

    kind: ClassVar[Any]  # the class of its data sets
    batches_of: ClassVar[Any]  # the class of its batches

    batches: PictureBatches[Any]
    defects: Defects
    started: str = ""

    @staticmethod
    @abstractmethod
    def reader(data: Any) -> Any:
        """What decodes one of the set's items."""

    @classmethod
    def open(cls, spec: RunSpec, device: torch.device, processes: Processes, shared: dict[Any, Any]) -> Task:
        task = cls(spec, device, processes)
        key = (spec.data, str(spec.data_root), spec.recipe.bad_data)
        if key not in shared:
            defects = Defects(spec.recipe.bad_data)
            loaded = data_room.load(spec.data, spec.data_root, defects=defects)
            found = data_room.expect(cls.kind, loaded, cls.name)
            read = cls.reader(found)
            train, test = (PictureStore(part, read, device, defects) for part in (found.train, found.test))
            shared[key] = Pictures(found, train, test, defects)
        task.defects = shared[key].defects
        task.batches = cls.batches_of(shared[key], processes, spec.recipe, device)
        return task

    def start_(self, model: nn.Module) -> nn.Module:
        """The model, its backbone filled with trained weights where the recipe says so."""
        if self.spec.pretrained is not None:
            self.started = start_backbone_(model, self.spec.pretrained)
        return model

    def notes(self) -> list[str]:
        return [*([self.started] if self.started else []), *self.defects.notes()]

    def keep(self, model: nn.Module, precision: AbstractContextManager[Any]) -> None:
        with precision:
            shown = self.examples(model)
        write_examples(self.spec.out, shown, self.batches.data.class_names)
        if self.defects.found:
            (self.spec.out / "skipped.txt").write_text("\n".join(self.defects.found) + "\n", encoding="utf-8")

    @abstractmethod
    def examples(self, model: nn.Module) -> list[tuple[Tensor, Any, Any]]:
        """A few test pictures with what is in them and what the model finds."""
