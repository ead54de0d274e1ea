"""The parts of a report as plain data: one section for each recipe and data set, with its figures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from ..training.comparable import machine
from ..training.compare import Comparison, compare
from ..training.metrics import Metric
from ..training.recipe import slug
from .bubble import bubble_figure
from .collecting import Collection, RunFile
from .curves import curves_figure
from .examples import example_sheet
from .frontier import frontier_figure
from .scene import Drawing
from .strip import strip_figure

MOST_STRIPS = 12  # of one section


@dataclass(frozen=True, kw_only=True)
class Section:
    """Runs of one recipe on one data set in one folder, and what they came to."""

    key: str  # unique in the report: a heading's id, and the start of its figures' names
    recipe: str
    data: str
    folder: Path
    metric: Metric
    runs: tuple[RunFile, ...]
    comparison: Comparison | None  # None while nothing is finished, or where the runs can't be compared
    problem: str  # why there is no comparison
    figures: tuple[Drawing, ...]
    strips: tuple[Drawing, ...]
    examples: bytes | None = None  # pictures with what the methods found in them, as one PNG

    @property
    def running(self) -> tuple[RunFile, ...]:
        return tuple(run for run in self.runs if not run.result.finished)

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(sorted({machine(run.result) for run in self.runs}))

    @property
    def versions(self) -> tuple[str, ...]:
        """Every set of versions among the runs: one, unless some were trained later."""
        found = {
            ", ".join(f"{name} {number}" for name, number in run.result.versions.items()) for run in self.runs
        }
        return tuple(sorted(text for text in found if text))


def sections_of(collection: Collection) -> list[Section]:
    """One section for each recipe, data set and folder, in the order of the folders."""
    groups: dict[tuple[Path, str, str], list[RunFile]] = defaultdict(list)
    for run in collection.runs:
        groups[run.group, str(run.result.recipe.get("name", "?")), run.result.data].append(run)
    keys: set[str] = set()
    return [
        _section(collection.root, folder, name, data, runs, keys) for (folder, name, data), runs in groups.items()
    ]


def _section(root: Path, folder: Path, name: str, data: str, runs: Sequence[RunFile], keys: set[str]) -> Section:
    key = unique(slug(f"{name}-{data}") or "runs", keys)
    results = [run.result for run in runs]
    metric = results[0].metric
    comparison, problem = None, ""
    try:
        (comparison,) = compare(results)
    except ReplearnError as error:
        problem = str(error)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = f"These runs can't be compared: {type(error).__name__}: {error}."
    try:
        examples = example_sheet(root, runs)
    except (ReplearnError, ImportError) as error:  # a report shows what it can
        examples, problem = None, f"{problem} {error}".strip()
    figures: list[Drawing | None] = []
    if comparison is not None:
        variants = {str(result.variant["label"]): result.variant for result in results}
        figures.append(bubble_figure(comparison.rows, metric, f"{key}-bubble"))
        figures.append(curves_figure(ordered(results, comparison), metric, f"{key}-curves"))
        figures.append(frontier_figure(comparison.rows, variants, metric, f"{key}-frontier"))
    else:
        figures.append(curves_figure(results, metric, f"{key}-curves"))
    return Section(
        key=key,
        recipe=name,
        data=data,
        folder=folder,
        metric=metric,
        runs=tuple(runs),
        comparison=comparison,
        problem=problem,
        figures=tuple(figure for figure in figures if figure is not None and figure.marks),
        strips=tuple(_strips(runs, key)),
        examples=examples,
    )


def ordered(results: Sequence[Any], comparison: Comparison) -> list[Any]:
    """The results in the order of the comparison's rows, so that colours agree between figures."""
    order = [row.label for row in comparison.rows]
    return sorted(
        results,
        key=lambda result: (
            order.index(str(result.variant["label"])) if str(result.variant["label"]) in order else len(order)
        ),
    )


def _strips(runs: Sequence[RunFile], key: str) -> list[Drawing]:
    """A strip for each plan that differs; rows that share one are named together."""
    labels: dict[str, list[str]] = defaultdict(list)
    plans: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if not run.result.plan:
            continue
        text = json.dumps(run.result.plan, sort_keys=True)
        plans[text] = run.result.plan
        label = str(run.result.variant["label"])
        if label not in labels[text]:
            labels[text].append(label)
    model = str(runs[0].result.recipe["model"])
    drawn = [
        strip_figure(plan, model, ", ".join(labels[text]), f"{key}-plan-{number}")
        for number, (text, plan) in enumerate(list(plans.items())[:MOST_STRIPS], start=1)
    ]
    return [drawing for drawing in drawn if drawing is not None]


def unique(key: str, keys: set[str]) -> str:
    found, number = key, 2
    while found in keys:
        found, number = f"{key}-{number}", number + 1
    keys.add(found)
    return found
