"""The door `paper_figures`: run folders in; the t-SNE figure, the feature maps and their numbers out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from ...errors import ReplearnError
from ...planning.serialization import encode
from ..training.results import write_atomically
from ..training.trained import Trained, read_trained
from .building import write_figures
from .feature_maps import Likeness, feature_maps
from .features import FeatureScores, feature_scores, features_figure


def paper_figures(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    images: int = 1000,
    layers: Sequence[str] | None = None,
    data_root: Path | None = None,
    device: torch.device | None = None,
) -> tuple[list[Path], list[FeatureScores], list[Likeness]]:
    """Draw features.svg/png and feature_maps.svg/png into a folder, with the numbers in figures.json.

    The runs must be of one model on one data set: E2E first, then what is held against it.
    """
    if not folders:
        raise ReplearnError("Name the folders of finished runs, E2E first: `replearn figures RUN RUN -o figures`.")
    runs = [read_trained(folder, device, data_root) for folder in folders]
    check_alike(runs, folders)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplearnError(f"Can't write the figures into {out}: {error}.") from error
    scores = [feature_scores(run, images, 5 * images) for run in runs]
    written = write_figures([features_figure(scores)], out, svg=True, png=True)
    maps, likeness = feature_maps(runs, out, layers)
    numbers = [{**encode(score), "points": None, "classes": None} for score in scores]
    text = {
        "runs": [str(folder) for folder in folders],
        "features": [{key: value for key, value in row.items() if value is not None} for row in numbers],
        "likeness": [encode(entry) for entry in likeness],
    }
    write_atomically(out / "figures.json", json.dumps(text, indent=1))
    return [*written, *maps, out / "figures.json"], scores, likeness


def check_alike(runs: Sequence[Trained], folders: Sequence[str | Path]) -> None:
    first = runs[0]
    for run, folder in zip(runs[1:], folders[1:], strict=True):
        for what, one, other in (
            ("model", first.recipe.model, run.recipe.model),
            ("data set", first.result.data, run.result.data),
        ):
            if one != other:
                raise ReplearnError(
                    f"{folder} can't stand beside {folders[0]}: its {what} is {other}, not {one}. "
                    "Compare runs of one recipe."
                )
