"""The paper's figures of finished runs: t-SNE of the features before the classifier, and feature maps.

With numbers that a picture can't give: silhouette, nearest neighbours, and how alike runs are at a layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.stacks import find_stacks
from ...errors import ReplearnError
from ...planning.serialization import encode
from ..training.architectures import library
from ..training.results import write_atomically
from ..training.trained import Trained, fresh_model, read_trained
from .matplotlib_figure import new_figure, save

MOST_LAYERS = 6
NEIGHBOURS = 20
PER_CLASS = FEW = 10  # images of a class; up to FEW classes may have fewer
MOST_BYTES = 2**30  # of images at once, so that a streamed set is read in part


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Linear CKA of two runs at one layer, from 0 (unrelated) to 1 (alike up to a rotation)."""

    layer: str
    one: str
    other: str
    cka: float


@dataclass(frozen=True, kw_only=True)
class FeatureScores:
    """How well the classes lie apart in the features of the layer before the classifier."""

    label: str
    seed: int
    test_images: int
    train_images: int
    silhouette: float  # the mean over test images, from -1 to 1
    knn_accuracy: float  # of the vote of the nearest training images, in percent
    points: tuple[tuple[float, float], ...]
    classes: tuple[int, ...]


def paper_figures(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    images: int = 1000,
    layers: Sequence[str] | None = None,
    data_root: Path | None = None,
    device: torch.device | None = None,
) -> tuple[list[Path], list[FeatureScores], list[Likeness]]:
    """Draw features.svg and feature_maps.png into a folder, with the numbers in figures.json.

    The runs must be of one model on one data set: E2E first, then what is held against it.
    """
    if not folders:
        raise ReplearnError("Name the folders of finished runs, E2E first: `replearn figures RUN RUN -o figures`.")
    runs = [read_trained(folder, device, data_root) for folder in folders]
    check_alike(runs, folders)
    out = Path(out)
    scores = [feature_scores(run, images, 5 * images) for run in runs]
    features = save(features_figure(scores), out / "features.svg")
    likeness = feature_maps(runs, out / "feature_maps.png", layers)
    numbers = [encode(replace(score, points=(), classes=())) for score in scores]
    text = {"runs": [str(folder) for folder in folders], "features": numbers, "likeness": encode(likeness)}
    write_atomically(out / "figures.json", json.dumps(text, indent=1))
    return [features, out / "feature_maps.png", out / "figures.json"], scores, likeness


def check_alike(runs: Sequence[Trained], folders: Sequence[str | Path]) -> None:
    kinds = [{"model": run.recipe.model, "data set": run.result.data} for run in runs]
    for kind, folder in zip(kinds, folders, strict=True):
        for what, expected in kinds[0].items():
            if kind[what] != expected:
                raise ReplearnError(
                    f"{folder} can't stand beside {folders[0]}: its {what} is {kind[what]}, not {expected}. "
                    "Compare runs of one recipe."
                )


def feature_scores(run: Trained, test_images: int = 1000, train_images: int = 5000) -> FeatureScores:
    """The numbers and the t-SNE points of one run. Deterministic: the same images and start every time."""
    manifold, metrics, neighbors = (
        library(f"sklearn.{part}", "report") for part in ("manifold", "metrics", "neighbors")
    )
    shown = bounded(run, test_images)
    classes = max(shown // PER_CLASS, min(FEW, shown // 2))
    x, y = run.test(shown, classes)
    if len(y) < 10 or len(set(y.tolist())) < 2:
        raise ReplearnError(f"{len(y)} images are too few for a t-SNE; write at least 10, of two classes.")
    known_x, known_y = run.train(bounded(run, train_images), classes)
    features, known = (penultimate(run.model, images).cpu().numpy() for images in (x, known_x))
    labels, known_labels = y.cpu().numpy(), known_y.cpu().numpy()
    vote = neighbors.KNeighborsClassifier(n_neighbors=min(NEIGHBOURS, len(known_labels))).fit(known, known_labels)
    perplexity = min(30.0, (len(labels) - 1) / 3)
    points = manifold.TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return FeatureScores(
        label=run.label,
        seed=run.result.seed,
        test_images=len(labels),
        train_images=len(known_labels),
        silhouette=float(metrics.silhouette_score(features, labels)),
        knn_accuracy=100 * float(vote.score(features, labels)),
        points=tuple((float(a), float(b)) for a, b in points),
        classes=tuple(int(label) for label in labels),
    )


def bounded(run: Trained, count: int) -> int:
    """At most so many images, and no more than fit in MOST_BYTES."""
    return min(count, max(10, MOST_BYTES // (4 * run.example[0].numel())))


@torch.no_grad()
def penultimate(model: nn.Module, images: Tensor, batch: int = 256) -> Tensor:
    """What the classifier is given: the input of the model's last linear layer, a row an image."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    name, caught = type(model).__name__, list[Tensor]()
    if not linears:
        raise ReplearnError(f"{name} has no linear layer, so it has no features before one.")
    handle = linears[-1].register_forward_pre_hook(lambda _, args: caught.append(args[0].flatten(1).float()))
    try:
        for part in images.split(batch):
            model(part)
    finally:
        handle.remove()
    if not caught:
        raise ReplearnError(f"{name} does not run its last linear layer; its features are not known.")
    found = torch.cat(caught)
    if not torch.isfinite(found).all():
        raise ReplearnError(f"The features of {name} are not finite: this run has diverged.")
    return found


def features_figure(scores: Sequence[FeatureScores]) -> Any:
    """The runs side by side, a dot a test image; a colour for each of the first ten classes."""
    figure = new_figure(3.8 * len(scores), 4.4)
    shown = sorted({label for score in scores for label in score.classes})
    colours = {label: f"C{number}" for number, label in enumerate(shown[:10])}
    for axes, score in zip(figure.subplots(1, len(scores), squeeze=False)[0], scores, strict=True):
        numbers = f"silhouette {score.silhouette:.3f}, {NEIGHBOURS}-NN accuracy {score.knn_accuracy:.2f} %"
        axes.set_title(f"{score.label}, seed {score.seed}\n{numbers}", fontsize=9)
        xs, ys = zip(*score.points, strict=True)
        axes.scatter(xs, ys, s=6, c=[colours.get(label, "lightgray") for label in score.classes], alpha=0.75)
        axes.set(xticks=[], yticks=[], aspect="equal")
    others = {f"{len(shown) - 10} other classes": "lightgray"} if len(shown) > 10 else {}
    entries = {f"class {label}": colour for label, colour in colours.items()} | others
    for label, colour in entries.items():
        axes.scatter([], [], s=20, c=colour, label=label)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def default_layers(run: Trained) -> tuple[str, ...]:
    """The last block of every stack; of a single stack, blocks a quarter apart."""
    stacks = find_stacks(fresh_model(run.recipe, run.result.data)[0])
    if len(stacks) == 1:
        blocks = stacks[0].blocks
        return tuple(dict.fromkeys(blocks[max(0, len(blocks) * part // 4 - 1)] for part in (1, 2, 3, 4)))
    return tuple(stack.blocks[-1] for stack in stacks)[:MOST_LAYERS]


@torch.no_grad()
def outputs_at(model: nn.Module, layers: Sequence[str], images: Tensor) -> dict[str, Tensor]:
    caught: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    if missing := [name for name in layers if name not in modules]:
        known = ", ".join(list(dict(model.named_children()))[:12])
        raise ReplearnError(f"The model has no layer {missing[0]!r}; its parts are {known}.")

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        caught[name] = (output[0] if isinstance(output, tuple) else output).float()

    handles = [modules[name].register_forward_hook(partial(keep, name)) for name in layers]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    if missing := [name for name in layers if name not in caught]:
        raise ReplearnError(f"The layer {missing[0]!r} did not run, so it has no feature map.")
    return caught


def maps_of(output: Tensor) -> Tensor:
    """One map an image (N, H, W): the mean size over channels, of a convolution's output or of a ViT's patches."""
    if output.dim() == 4:
        return output.abs().mean(1)
    if output.dim() == 3:  # tokens: class tokens come first, the patches last
        side = isqrt(output.shape[1])
        patches = output[:, output.shape[1] - side * side :]
        found: Tensor = patches.abs().mean(2).unflatten(1, (side, side))
        return found
    raise ReplearnError(f"A layer's output of shape {tuple(output.shape)} is no picture; choose another layer.")


def cka(one: Tensor, other: Tensor) -> float:
    """Linear centred kernel alignment of two sets of features, rows by image.

    >>> import torch
    >>> x = torch.randn(8, 3)
    >>> round(cka(x, 2 * x + 1), 3)
    1.0
    """
    a, b = ((x.flatten(1).double() - x.flatten(1).double().mean(0)) for x in (one, other))
    a, b = a @ a.T, b @ b.T  # by images, which are fewer than features
    scale = float(a.norm() * b.norm())
    return float((a * b).sum()) / scale if scale > 0 else 0.0


def feature_maps(
    runs: Sequence[Trained], path: Path, layers: Sequence[str] | None = None, images: int = 4, compared: int = 128
) -> list[Likeness]:
    """Draw the maps of every run for the same test images; how alike each further run is to the first."""
    layers = tuple(layers) if layers else default_layers(runs[0])
    x, _ = runs[0].test(max(images, compared))
    outputs = [outputs_at(run.model, layers, x) for run in runs]
    width = 1 + len(layers) * len(runs)
    figure = new_figure(1.3 * width, 1.3 * images + 0.5)
    grid = figure.subplots(images, width, squeeze=False)
    for row, shown in enumerate(picture(x[:images])):
        grid[row][0].imshow(shown.cpu().numpy(), cmap="gray")
        pairs = [(layer, run, found) for layer in layers for run, found in zip(runs, outputs, strict=True)]
        for cell, (layer, run, found) in zip(grid[row][1:], pairs, strict=True):
            cell.imshow(maps_of(found[layer][row : row + 1])[0].cpu().numpy(), cmap="viridis")
            if row == 0:
                cell.set_title(f"{layer}\n{run.label}", fontsize=9)
    grid[0][0].set_title("image", fontsize=9)
    for cell in grid.flat:
        cell.set(xticks=[], yticks=[])
    save(figure, path)
    return [
        Likeness(layer=layer, one=runs[0].label, other=run.label, cka=cka(outputs[0][layer], found[layer]))
        for layer in layers
        for run, found in zip(runs[1:], outputs[1:], strict=True)
    ]


def picture(x: Tensor) -> Tensor:
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    stretched = ((x - low) / (high - low).clamp_min(1e-6)).permute(0, 2, 3, 1)
    return stretched[..., 0] if stretched.shape[-1] == 1 else stretched[..., :3]
