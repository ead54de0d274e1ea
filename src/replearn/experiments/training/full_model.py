"""The full model of a run that was trained end to end, with samples of its data to look at it with."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...errors import ReplearnError
from .augmentation import DeviceImages
from .batches import DeviceBatches, ImageBatches
from .processes import Processes
from .recipe import Augment, variant_from_dict
from .run import RunSpec
from .streaming import StreamBatches
from .tasks import Task, task_named
from .text_batches import TextBatches
from .trained import read_trained

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class FullModel:
    """A model with all of its blocks, its task and its data on the same device.

    A sample is an image with its label, or a window of words with the word after each.
    """

    model: nn.Module
    task: Task
    name: str  # recipe, data set, seed and epoch, to print

    @property
    def metric(self) -> str:
        """What `score` gives: accuracy, perplexity."""
        return self.task.metric.name

    @property
    def samples(self) -> str:
        return "images" if isinstance(self.task.batches, ImageBatches) else "windows"

    def train_batches(self, count: int, size: int, seed: int = 0) -> list[Labelled]:
        """So many training samples, drawn once and not augmented, in batches with their labels.

        A streamed set is read for no more than these.
        """
        batches = self.task.batches
        if isinstance(batches, TextBatches):
            starts = batches.starts(seed, -1)[:count].to(self.task.device)
            return [batches.cut(part) for part in starts.split(size)]
        if isinstance(batches, StreamBatches):
            part = batches.data.part(count, 1, seed)
            return DeviceImages(part, Augment(), self.task.device).drawn(count, size, seed)
        held: DeviceBatches = batches  # type: ignore[assignment]
        return held.images.drawn(count, size, seed)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """The task's metric on the test set, as the model stands, in float32."""
        return self.task.evaluate(model, nullcontext())[self.task.metric.key]

    def forward(self, model: nn.Module, batch: Labelled) -> Tensor:
        """A model's logits; Hugging Face models give them in a field of an object."""
        made = model(batch[0])
        logits: Tensor = made if isinstance(made, Tensor) else made.logits
        return logits

    def loss(self, output: Tensor, batch: Labelled) -> Tensor:
        return cross_entropy(output.flatten(0, -2), batch[1].flatten())

    def hits(self, output: Tensor, batch: Labelled) -> float:
        """The share of labels, or of next words, that are said rightly, in percent."""
        return 100 * float((output.argmax(-1) == batch[1]).float().mean())


def read_full_model(
    folder: str | Path, device: torch.device, root: Path | None = None, *, full: bool = True
) -> FullModel:
    """The model of a finished end-to-end run, with its data; ReplearnError as `read_trained` has it.

    With `full=False` a run of any method. Also raises for data that is neither images with labels nor text.
    """
    trained = read_trained(folder, device, root, full=full)
    result = trained.result
    # samples are looked at as they are, and the weights are the run's own
    plain = Augment(resize=trained.recipe.augment.get(result.data, Augment()).resize)
    recipe = replace(trained.recipe, augment={result.data: plain}, pretrained=None, channels_last=False)
    spec = RunSpec(
        recipe=recipe,
        variant=replace(variant_from_dict(result.variant), calibrate=0),
        data=result.data,
        seed=result.seed,
        out=Path(folder),
        data_root=root,
    )
    task = task_named(recipe.task).open(spec, device, Processes(), {})
    if not isinstance(task.batches, (ImageBatches, TextBatches)):
        raise ReplearnError(f"{result.data} holds scenes, and this command takes images with labels, or a text.")
    return FullModel(trained.model, task, trained.name)
