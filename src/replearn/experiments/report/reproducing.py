"""How to make a row again: the command line that trains it, from what its result file says."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import recipes
from ..training.comparable import differences
from ..training.recipe import slug
from .collecting import RunFile


def command_of(runs: Sequence[RunFile]) -> str:
    """The command for the runs of one row; of a recipe that is not shipped, by the `recipe.json` beside them.

    What the command line can't say (a variant that the shipped recipe does not have) also goes by that file.
    """
    result = runs[0].result
    name = str(result.recipe.get("name", "?"))
    label = str(result.variant["label"])
    shipped = recipes.recipe(name).to_dict() if name in recipes.available() else None
    seeds = seeds_text(sorted({run.result.seed for run in runs}))
    words = ["replearn", "compare", name, "--data", result.data, "--methods", slug(label), "--seeds", seeds]
    if shipped is None or label not in [variant["label"] for variant in shipped["variants"]]:
        words[2] = (runs[0].path.parent / "recipe.json").as_posix()
        return shlex.join(words)
    changed = dict(settings(shipped, result.recipe))
    if (epochs := changed.pop("epochs", None)) is not None:
        words += ["--epochs", epochs]
    for field, value in changed.items():
        words += ["--set", f"{field}={value}"]
    return shlex.join(words)


def settings(shipped: Mapping[str, Any], trained: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    """What was changed, as `--set` writes it: `optimizer.lr`, `0.4`."""
    for field, before, now in differences(shipped, trained):
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from settings(before, now, f"{group}{field}.")
        elif now is not None or before is not None:
            yield f"{group}{field}", now if isinstance(now, str) else json.dumps(now)


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds as the command line takes them.

    >>> seeds_text([0, 1, 2, 7])
    '0-2,7'
    """
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
