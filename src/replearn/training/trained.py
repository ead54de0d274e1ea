"""A trained run read back from its folder: the model, and batches of its data to look at it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from .architectures import architecture
from .augmentation import DeviceImages
from .data import ImageSet, load
from .recipe import Augment
from .state import read_state, under

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Trained:
    """The model of a run, trained end to end, with its data on the same device."""

    model: nn.Module
    images: DeviceImages
    name: str  # recipe, data set, seed and epoch, to print

    def train_batches(self, count: int, size: int, seed: int = 0) -> list[Labelled]:
        """So many training images, drawn once and not augmented, in batches with their labels."""
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))[:count]
        draws = torch.zeros(len(order), 4, dtype=torch.int64)
        draws[:, 0] = order
        return [self.images.batch(part.to(self.images.labels.device)) for part in draws.split(size)]

    @torch.no_grad()
    def accuracy(self, model: nn.Module, size: int = 1000) -> float:
        """The accuracy of a model on the test set, in percent."""
        images = self.images
        parts = zip(images.test_images.split(size), images.test_labels.split(size), strict=True)
        hits = sum(int((model(images.normalised(x)).argmax(1) == y).sum()) for x, y in parts)
        return 100 * hits / len(images.test_labels)


def read_trained(folder: str | Path, device: torch.device, root: Path | None = None) -> Trained:
    """The run in a folder that `replearn train` wrote, or the one of a checkpoint file in it.

    Raises ReplearnError where there is none, where it was not trained end to end (then blocks are missing
    that an analysis needs), or where its data is streamed.
    """
    path = Path(folder)
    path = path / "checkpoint.safetensors" if path.is_dir() else path
    if not path.exists():
        raise ReplearnError(
            f"There is no checkpoint at {path}. Name the folder of a finished run, as "
            "runs/t1_resnet32/cifar10/e2e/seed-0; `replearn train RECIPE --method e2e` writes one."
        )
    tensors, about = read_state(path)
    identity: dict[str, Any] = about.get("identity", {})
    if not {"recipe", "variant", "data"} <= identity.keys():
        raise ReplearnError(
            f"{path} does not say which recipe it belongs to; train it again with `replearn train`."
        )
    recipe, variant, data = identity["recipe"], identity["variant"], identity["data"]
    if variant["method"] != "e2e":
        raise ReplearnError(
            f"{path} was trained with {variant['label']} ({variant['method']}), so it is not the full model with "
            "all of its blocks. Name a run of method e2e."
        )
    loaded = load(data, root)
    if not isinstance(loaded, ImageSet):
        raise ReplearnError(
            f"{data} is streamed or a text, and this command takes sets of images that fit in memory; in Python, "
            "pass batches of your own to replearn.analysis.analyze."
        )
    if recipe.get("classes"):
        loaded = loaded.with_classes(recipe["classes"])
    resize = recipe.get("augment", {}).get(data, {}).get("resize")
    images = DeviceImages(loaded, Augment(resize=resize), device)
    model = architecture(
        recipe["model"], num_classes=loaded.num_classes, channels=loaded.channels, size=images.size
    )
    averaged = under(tensors, "ema/module.")
    model.load_state_dict(averaged or under(tensors, "model/"))
    name = f"{recipe['name']}, {data}, seed {identity['seed']}, epoch {about['epoch']}"
    return Trained(model.to(device).eval(), images, name)
