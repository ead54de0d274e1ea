"""A run's trained model and its data, from the folder that `replearn train` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..checkpoint import load
from ..errors import ReplearnError
from ..training import data as data_room
from ..training.architectures import architecture
from ..training.augmentation import DeviceImages
from ..training.data import ImageSet
from ..training.data.ordering import stratified_order
from ..training.methods import method_for
from ..training.methods.base import Setting
from ..training.recipe import Augment, Recipe, recipe_from_dict, variant_from_dict
from ..training.results import Result, read_result
from ..training.state import FORMAT, read_state


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run: what it is called, its model in eval mode, and images to look at."""

    label: str
    result: Result
    recipe: Recipe
    model: nn.Module
    images: DeviceImages

    def test(self, count: int) -> tuple[Tensor, Tensor]:
        """Test images as the model takes them, and labels: the same ones for every run, classes evenly."""
        return self._some(self.images.test_images, self.images.test_labels, count)

    def train(self, count: int) -> tuple[Tensor, Tensor]:
        """Training images without augmentation, and labels."""
        images = self.images.originals()
        return self._some(images, self.images.labels, count)

    def _some(self, images: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        chosen = stratified_order(labels.cpu(), 0)[:count].to(labels.device)
        return self.images.normalised(images[chosen]), labels[chosen]


def trained_run(folder: str | Path, data_root: Path | None = None, device: torch.device | None = None) -> Trained:
    """Load a finished run; ReplearnError says what is missing, or does not fit."""
    folder = Path(folder)
    result = read_result(folder / "result.json")
    path = folder / "model.safetensors"
    if not path.exists():
        state = "has not finished" if not result.finished else "was trained in shards"
        raise ReplearnError(
            f"{folder} has no model.safetensors: the run {state}. Finish it with `replearn train --resume`."
        )
    recipe, variant = recipe_from_dict(result.recipe), variant_from_dict(result.variant)
    data = data_room.load(result.data, data_root)
    if not isinstance(data, ImageSet):
        raise ReplearnError(f"Figures need a data set that fits into memory, and {result.data} is a stream.")
    device = device or torch.device("cpu")
    images = DeviceImages(data, recipe.augment.get(result.data, Augment()), device)
    model = architecture(recipe.model, num_classes=data.num_classes, channels=data.channels, size=images.size)
    if holds_plan(path):
        model = load(model, path)
    else:
        method = method_for(Setting(variant, result.seed, recipe.epochs))
        model = method.finish(method.prepare(model))
        tensors, _ = read_state(path)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ReplearnError(f"{path} does not fit the model {recipe.model}: {error}.") from error
    return Trained(variant.label, result, recipe, model.to(device).eval(), images)


def holds_plan(path: Path) -> bool:
    """Whether the file is one of `replearn.save`, with a plan, rather than a plain state."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return (file.metadata() or {}).get("format") != FORMAT
    except (SafetensorError, OSError) as error:
        raise ReplearnError(f"The model {path} can't be read: {error}.") from error
