"""The paper's figures of finished runs: t-SNE of the features before the classifier, and feature maps.

With the silhouette of the classes, which says how far they lie apart in all dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...blocks.stacks import find_stacks
from ...compression.matplotlib_figure import new_figure, save
from ...errors import ReplearnError, library
from ..training.results import write_atomically
from ..training.trained import Trained, fresh_model, read_trained

MOST_LAYERS = 6
SHOWN = 4  # images whose maps are drawn
PER_CLASS = FEW = 10  # images of a class; up to FEW classes may have fewer
MOST_BYTES = 2**30  # of images at once, so that a streamed set is read in part


class Features(NamedTuple):
    """How the classes lie in the features of the layer before the classifier."""

    label: str
    seed: int
    silhouette: float  # the mean over test images, from -1 to 1
    points: Sequence[tuple[float, float]]
    classes: Sequence[int]


def paper_figures(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    images: int = 1000,
    layers: Sequence[str] | None = None,
    data_root: Path | None = None,
    device: torch.device | None = None,
) -> tuple[list[Path], list[Features]]:
    """Draw features.svg and feature_maps.png into a folder, with the silhouettes in figures.json.

    The runs must be of one model on one data set: E2E first, then what is held against it.
    """
    if not folders:
        raise ReplearnError("Name the folders of finished runs, E2E first: `replearn figures RUN RUN -o figures`.")
    runs = [read_trained(folder, device, data_root) for folder in folders]
    kinds = [{"model": run.recipe.model, "data set": run.result.data} for run in runs]
    for kind, folder in zip(kinds, folders, strict=True):
        for what, expected in kinds[0].items():
            if kind[what] != expected:
                raise ReplearnError(
                    f"{folder} can't stand beside {folders[0]}: its {what} is {kind[what]}, not {expected}. "
                    "Compare runs of one recipe."
                )
    out = Path(out)
    found = [features_of(run, images) for run in runs]
    features = save(features_figure(found), out / "features.svg")
    maps = feature_maps(runs, out / "feature_maps.png", layers)
    text = {
        "runs": [str(folder) for folder in folders],
        "features": [{"label": each.label, "seed": each.seed, "silhouette": each.silhouette} for each in found],
    }
    write_atomically(out / "figures.json", json.dumps(text, indent=1))
    return [features, maps, out / "figures.json"], found


def features_of(run: Trained, images: int = 1000) -> Features:
    """The t-SNE points of one run's test images. Deterministic: the same images and start every time."""
    manifold, metrics = (library(f"sklearn.{part}", "report") for part in ("manifold", "metrics"))
    images = bounded(run, images)
    x, y = run.test(images, max(images // PER_CLASS, min(FEW, images // 2)))
    labels = y.tolist()
    if len(labels) < 10 or len(set(labels)) < 2:
        raise ReplearnError(f"{len(labels)} images are too few for a t-SNE; write at least 10, of two classes.")
    features = penultimate(run.model, x).cpu().numpy()
    perplexity = min(30.0, (len(labels) - 1) / 3)
    points = manifold.TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    silhouette = float(metrics.silhouette_score(features, labels))
    return Features(run.label, run.result.seed, silhouette, points.tolist(), labels)


def bounded(run: Trained, count: int) -> int:
    """At most so many images, and no more than fit in MOST_BYTES."""
    return min(count, max(10, MOST_BYTES // (4 * run.example[0].numel())))


@torch.no_grad()
def outputs_at(
    model: nn.Module, layers: Sequence[str], images: Tensor, *, inputs: bool = False, batch: int = 256
) -> dict[str, Tensor]:
    """What layers give for these images, or what they are given."""
    modules = dict(model.named_modules())
    if missing := [name for name in layers if name not in modules]:
        known = ", ".join(list(dict(model.named_children()))[:12])
        raise ReplearnError(f"The model has no layer {missing[0]!r}; its parts are {known}.")
    caught: dict[str, list[Tensor]] = {name: [] for name in layers}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        found = args if inputs else output
        caught[name].append((found[0] if isinstance(found, tuple) else found).float())

    handles = [modules[name].register_forward_hook(partial(keep, name)) for name in layers]
    try:
        for part in images.split(batch):
            model(part)
    finally:
        for handle in handles:
            handle.remove()
    if silent := [name for name, parts in caught.items() if not parts]:
        raise ReplearnError(f"The layer {silent[0]!r} did not run, so nothing is known of it.")
    return {name: torch.cat(parts) for name, parts in caught.items()}


def penultimate(model: nn.Module, images: Tensor, batch: int = 256) -> Tensor:
    """What the classifier is given: the input of the model's last linear layer, a row an image."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ReplearnError(f"{type(model).__name__} has no linear layer, so it has no features before one.")
    (found,) = outputs_at(model, linears[-1:], images, inputs=True, batch=batch).values()
    if not torch.isfinite(found).all():
        raise ReplearnError(f"The features of {type(model).__name__} are not finite: this run has diverged.")
    return found.flatten(1)


def features_figure(found: Sequence[Features]) -> Any:
    """The runs side by side, a dot a test image; a colour for each of the first ten classes."""
    figure = new_figure(3.8 * len(found), 4.4)
    shown = sorted({label for each in found for label in each.classes})
    colours = {label: f"C{number}" for number, label in enumerate(shown[:10])}
    for axes, each in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        axes.set_title(f"{each.label}, seed {each.seed}\nsilhouette {each.silhouette:.3f}", fontsize=10)
        xs, ys = zip(*each.points, strict=True)
        axes.scatter(xs, ys, s=6, c=[colours.get(label, "lightgray") for label in each.classes], alpha=0.75)
        axes.set(xticks=[], yticks=[], aspect="equal")
    others = {f"{len(shown) - 10} other classes": "lightgray"} if len(shown) > 10 else {}
    entries = {f"class {label}": colour for label, colour in colours.items()} | others
    for label, colour in entries.items():
        axes.scatter([], [], s=20, c=colour, label=label)
    figure.legend(loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    return figure


def default_layers(run: Trained) -> tuple[str, ...]:
    """The last block of every stack; of a single stack, blocks a quarter apart."""
    stacks = find_stacks(fresh_model(run.recipe, run.result.data)[0])
    if len(stacks) == 1:
        blocks = stacks[0].blocks
        return tuple(dict.fromkeys(blocks[max(0, len(blocks) * part // 4 - 1)] for part in (1, 2, 3, 4)))
    return tuple(stack.blocks[-1] for stack in stacks)[:MOST_LAYERS]


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


def feature_maps(runs: Sequence[Trained], path: Path, layers: Sequence[str] | None = None) -> Path:
    """Draw the maps of every run for the same test images, layer by layer."""
    layers = layers or default_layers(runs[0])
    x, _ = runs[0].test(SHOWN)
    outputs = [outputs_at(run.model, layers, x) for run in runs]
    columns = [("image", picture(x), "gray")]
    for layer in layers:
        for run, found in zip(runs, outputs, strict=True):
            columns.append((f"{layer}\n{run.label}", maps_of(found[layer]), "viridis"))
    figure = new_figure(1.3 * len(columns), 1.3 * SHOWN + 0.5)
    figure.patch.set_alpha(0)  # with grey titles, for light and dark pages
    cells = figure.subplots(SHOWN, len(columns), squeeze=False)
    for column, (title, maps, colours) in zip(cells.T, columns, strict=True):
        column[0].set_title(title, fontsize=10, color="#767c84")
        for cell, shown in zip(column, maps.cpu().numpy(), strict=True):
            cell.imshow(shown, cmap=colours)
            cell.set(xticks=[], yticks=[])
    return save(figure, path)


def picture(x: Tensor) -> Tensor:
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    stretched = ((x - low) / (high - low).clamp_min(1e-6)).permute(0, 2, 3, 1)
    return stretched[..., 0] if stretched.shape[-1] == 1 else stretched[..., :3]
