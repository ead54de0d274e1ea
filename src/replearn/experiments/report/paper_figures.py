"""The door `paper_figures`: the t-SNE figure and the feature maps of finished runs, with their numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
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
from ..training.results import write_atomically
from ..training.trained import Trained, fresh_model, read_trained
from .features import FeatureScores, feature_scores, features_figure
from .matplotlib_figure import new_figure, save

MOST_LAYERS = 6


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Linear CKA of two runs at one layer, from 0 (unrelated) to 1 (alike up to a rotation)."""

    layer: str
    one: str
    other: str
    cka: float


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
    with ExitStack() as hooks:
        for name in layers:
            if name not in modules:
                known = ", ".join(list(dict(model.named_children()))[:12])
                raise ReplearnError(f"The model has no layer {name!r}; its parts are {known}.")
            hooks.callback(modules[name].register_forward_hook(partial(_keep, caught, name)).remove)
        model(images)
    if missing := [name for name in layers if name not in caught]:
        raise ReplearnError(f"The layer {missing[0]!r} did not run, so it has no feature map.")
    return caught


def _keep(caught: dict[str, Tensor], name: str, module: nn.Module, args: Any, output: Any) -> None:
    caught[name] = (output[0] if isinstance(output, tuple) else output).float()


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
