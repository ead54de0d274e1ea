"""A trained run read back from its folder: what it was, its model, and its images to look at the model with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import ReplearnError
from ...surgery.checkpoint import load
from . import data as data_room
from .architectures import architecture, is_language_model, language_model
from .augmentation import DeviceImages
from .data import ImageSet
from .data.base import StreamedSet, stratified_order
from .methods import method_for
from .methods.base import Method, Setting
from .recipe import Augment, Recipe, recipe_from_dict, variant_from_dict
from .results import Result, read_result
from .scene_models import detector, is_detector, is_segmenter, segmenter
from .state import read_state

Labelled = tuple[Tensor, Tensor]
MODEL = "model.safetensors"
PART = 2048  # images of a streamed set that are looked at, of training and of test
ANY_WORDS = 64  # of a vocabulary, where nothing depends on its size
PLANNED = "replearn-checkpoint-"  # how the format of a file with a plan begins, of any version


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run: its result, its model in eval mode, and an example of the model's input.

    `images` opens the run's data set when it is first asked for, a part of one that is streamed; ReplearnError
    where that is not a set of images.
    """

    result: Result
    recipe: Recipe
    model: nn.Module
    example: Tensor
    data_root: Path | None = None

    @property
    def label(self) -> str:
        return str(self.result.variant["label"])

    @property
    def name(self) -> str:
        """Recipe, data set, seed and epoch, to print."""
        result = self.result
        return f"{self.recipe.name}, {result.data}, seed {result.seed}, epoch {len(result.epochs)}"

    @cached_property
    def images(self) -> DeviceImages:
        loaded = data_room.load(self.result.data, self.data_root)
        if isinstance(loaded, StreamedSet):
            loaded = replace(loaded, size=int(self.example.shape[-1])).part(PART, PART)
        if not isinstance(loaded, ImageSet):
            raise ReplearnError(f"{self.result.data} is no set of images, and this command takes images.")
        if self.recipe.classes:
            loaded = loaded.with_classes(self.recipe.classes)
        resize = self.recipe.augment.get(self.result.data, Augment()).resize
        return DeviceImages(loaded, Augment(resize=resize), self.example.device)

    def train_batches(self, count: int, size: int, seed: int = 0) -> list[Labelled]:
        """So many training images, drawn once and not augmented, in batches with their labels."""
        return self.images.drawn(count, size, seed)

    def test(self, count: int) -> Labelled:
        """Test images as the model takes them, and labels: the same ones for every run, classes evenly."""
        return self._evenly(self.images.test_images, self.images.test_labels, count)

    def train(self, count: int) -> Labelled:
        """Training images without augmentation, and labels, classes evenly."""
        return self._evenly(self.images.originals(), self.images.labels, count)

    def _evenly(self, images: Tensor, labels: Tensor, count: int) -> Labelled:
        chosen = stratified_order(labels.cpu(), 0)[:count].to(labels.device)
        return self.images.normalised(images[chosen]), labels[chosen]

    @torch.no_grad()
    def accuracy(self, model: nn.Module, size: int = 1000) -> float:
        """The accuracy of a model on the test set, in percent."""
        images = self.images
        parts = zip(images.test_images.split(size), images.test_labels.split(size), strict=True)
        hits = sum(int((model(images.normalised(x)).argmax(1) == y).sum()) for x, y in parts)
        return 100 * hits / len(images.test_labels)


def read_trained(
    folder: str | Path, device: torch.device | None = None, root: Path | None = None, *, full: bool = False
) -> Trained:
    """The finished run in a folder that `replearn train` wrote; a file in that folder stands for it.

    ReplearnError where there is none, where it is not finished or does not fit its recipe's model; with
    `full`, also where it was not trained end to end, for then blocks are missing that an analysis needs.
    """
    folder = Path(folder)
    folder = folder.parent if folder.is_file() else folder
    if not (folder / "result.json").exists():
        raise ReplearnError(
            f"There is no run at {folder}: it has no result.json. Name the folder of a finished run, as "
            "runs/t1_resnet32/cifar10/e2e/seed-0; `replearn train RECIPE --method e2e` writes one."
        )
    result = read_result(folder / "result.json")
    recipe, variant = recipe_from_dict(result.recipe), variant_from_dict(result.variant)
    if full and variant.method != "e2e":
        raise ReplearnError(
            f"{folder} was trained with {variant.label} ({variant.method}), so it is not the full model with "
            "all of its blocks. Name a run of method e2e."
        )
    if not (folder / MODEL).is_file():
        state = "was trained in shards" if result.finished else "has not finished"
        raise ReplearnError(
            f"{folder} has no {MODEL}: the run {state}. Finish it with `replearn train --resume`, in one process."
        )
    model, example = fresh_model(recipe, result.data, folder / MODEL)
    model = filled(model, folder / MODEL, method_for(Setting(variant, result.seed, recipe.epochs)))
    device = device or torch.device("cpu")
    return Trained(result, recipe, model.to(device), example.to(device), root)


def fresh_model(recipe: Recipe, data: str, file: Path | None = None) -> tuple[nn.Module, Tensor]:
    """The recipe's model as it was before training, and an example of its input; no data is read for it.

    A language model has the vocabulary of the weights in `file`, and without one just any.
    """
    if is_language_model(recipe.model):
        length = recipe.text.sequence_length
        num_words = ANY_WORDS if file is None else num_words_in(file)
        model = language_model(recipe.model, num_words=num_words, max_length=length)
        # from the first word to the last, since an export is tried on random words between the example's
        return model, torch.linspace(0, num_words - 1, 2 * length).long().reshape(2, length)
    classes, channels, size = data_room.shape_of(data)
    if is_detector(recipe.model):
        detecting = recipe.detection
        sides = [-(-side // 32) * 32 for side in (detecting.min_size[-1], detecting.min_size[-1] * 4 // 3)]
        return detector(recipe.model, num_classes=classes, settings=detecting), torch.rand(2, channels, *sides)
    if is_segmenter(recipe.model):
        side = recipe.segmentation.crop
        auxiliary = recipe.segmentation.auxiliary > 0
        model = segmenter(recipe.model, num_classes=classes, auxiliary=auxiliary)
        return model, torch.randn(2, channels, side, side)
    size = recipe.augment.get(data, Augment()).resize or size
    model = architecture(recipe.model, num_classes=len(recipe.classes) or classes, channels=channels, size=size)
    return model, torch.randn(2, channels, size, size)


def num_words_in(file: Path) -> int:
    """How many words the vocabulary had: the rows of the embedding, which may be stored as the output layer's."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            held = set(opened.keys())
            name = next(name for name in ("words.weight", "head.weight") if name in held)
            return int(opened.get_slice(name).get_shape()[0])
    except (SafetensorError, OSError, StopIteration) as error:
        raise ReplearnError(f"The model {file} can't be read: {error!r}.") from error


def filled(model: nn.Module, file: Path, method: Method | None = None) -> nn.Module:
    """A fresh model with a file's weights, in eval mode: replaced where the file has a plan, else as the method
    that it was trained with leaves it."""
    if not file.is_file():
        raise ReplearnError(f"There is no file or folder {file}. Name the folder of a run, or a checkpoint.")
    try:
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ReplearnError(f"The model {file} can't be read: {error}.") from error
    kind = about.get("format", "")
    if kind.startswith(PLANNED):
        return load(model, file).eval()
    tensors = read_state(file)[0] if kind.startswith("replearn-") else plain_tensors(file, about)
    if method is not None:
        model = method.finish(method.prepare(model))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ReplearnError(
            f"{file} does not fit {type(model).__name__}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return model.eval()


def plain_tensors(file: Path, about: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights in a safetensors file of any library, those that are tied under each of their names."""
    tensors = load_file(file)
    return tensors | {name: tensors[held] for name, held in about.items() if held in tensors}
