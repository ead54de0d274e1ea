"""What blocks are taken out of: a trained network with its samples and its test; published weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

import replearn
from replearn.experiments.training import data

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PUBLISHED = {"published-resnet56": "resnet56", "published-resnet32": "resnet32"}
PAD = 4


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network in eval mode, the blocks to take out, its training samples and its test."""

    name: str
    model: nn.Module
    out: tuple[str, ...]
    draw: Callable[[int, int], Tensor] = field(repr=False)  # a number of training samples without labels, a seed
    score: Callable[[nn.Module], float] = field(repr=False)  # on the test set
    net_seed: int = 0
    metric: str = "accuracy"
    augment: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)

    @cached_property
    def last_block(self) -> str:
        return str(replearn.find_stacks(self.model)[-1].blocks[-1])

    @cached_property
    def convolutional(self) -> bool:
        return any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules())

    def taking_out(self, names: Sequence[str]) -> Subject:
        return replace(self, out=tuple(names))


def every_second(model: nn.Module, interval: int = 2) -> tuple[str, ...]:
    """The second block of each stack and every `interval`-th after it; the first and the last stay."""
    return tuple(name for stack in replearn.find_stacks(model) for name in stack.blocks[1:-1:interval])


def evenly(blocks: tuple[str, ...], count: int) -> tuple[str, ...]:
    """So many of the blocks, equally far apart."""
    return tuple(blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count))


def published(name: str, folder: Path, root: Path | None, device: torch.device, test: int | None) -> Subject:
    """CIFAR-10 weights from a folder with resnet.py and resnetNN-*.th files, as their author publishes them."""
    depth = PUBLISHED[name]
    spec = importlib.util.spec_from_file_location("published_resnet", folder / "resnet.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} has no resnet.py that can be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = getattr(module, depth)()
    files = sorted(folder.glob(f"{depth}-*.th"))
    if not files:
        raise SystemExit(f"{folder} has no {depth}-*.th.")
    state = torch.load(files[0], map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return of_images(name, model.to(device), "cifar10", root, device, test, IMAGENET)


def of_images(
    name: str,
    model: nn.Module,
    source: str,
    root: Path | None,
    device: torch.device,
    test: int | None,
    statistics: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Subject:
    """A classifier of a data set that fits in memory; normalised by these mean and std, or by the set's own."""
    images = data.load(source, root)
    if not isinstance(images, data.ImageSet):
        raise SystemExit(f"{source} is not a set of images in memory.")
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1) for values in statistics or (images.mean, images.std)
    )

    def ready(pixels: Tensor) -> Tensor:
        return pixels.to(device).float().div(255).sub(mean).div(std)

    def draw(count: int, seed: int) -> Tensor:
        order = torch.randperm(len(images.train_images), generator=torch.Generator().manual_seed(seed))
        return ready(images.train_images[order[:count]])

    @torch.no_grad()
    def score(judged: nn.Module) -> float:
        hits = total = 0
        labels = images.test_labels[:test]
        for pixels, truth in zip(images.test_images[:test].split(500), labels.split(500), strict=True):
            hits += int((judged(ready(pixels)).argmax(1).cpu() == truth).sum())
            total += len(truth)
        return 100 * hits / total

    return Subject(name, model.eval(), every_second(model), draw, score, augment=crop_and_flip)


def crop_and_flip(images: Tensor) -> Tensor:
    """Every image cropped at random from itself with reflected edges of four pixels, and half of them flipped."""
    count, side = len(images), images.shape[-1]
    padded = nn.functional.pad(images, (PAD,) * 4, mode="reflect")
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)
    row, column = torch.randint(2 * PAD + 1, (2, count)).to(images.device)
    cropped = windows[torch.arange(count, device=images.device), :, row, column]
    flipped = torch.randint(2, (count, 1, 1, 1)).bool().to(images.device)
    return torch.where(flipped, cropped.flip(-1), cropped)
