"""The comparisons of a report as plain data: one for each recipe, data set and folder.

Cards, summary, claims and the fold of a comparison all read it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ...errors import ReplearnError
from ...planning.data import Plan
from ..training.comparable import machine
from ..training.compare import Comparison, Row, compare
from ..training.metrics import Metric
from ..training.recipe import slug
from .collecting import Collection, RunFile
from .figures import cost_figure, curves_figure, runs_figure
from .svg import Drawing


@dataclass(frozen=True, kw_only=True)
class Section:
    """Runs of one recipe on one data set in one folder, and what they came to."""

    key: str  # unique in the report: a heading's id, and the start of its figures' names
    title: str  # unique too: the recipe, its data and length, and the folder where those are not enough
    recipe: str
    data: str
    folder: Path
    runs: tuple[RunFile, ...]
    comparison: Comparison | None  # None while nothing is finished, or where the runs can't be compared
    problem: str  # why there is no comparison

    @property
    def metric(self) -> Metric:
        return self.runs[0].result.metric

    @property
    def running(self) -> tuple[RunFile, ...]:
        return tuple(run for run in self.runs if not run.result.finished)

    @property
    def made_with(self) -> str:
        """Hardware and versions of the runs: one set, unless some were trained later."""
        machines = sorted({machine(run.result) for run in self.runs})
        versions = {", ".join(f"{name} {n}" for name, n in run.result.versions.items()) for run in self.runs}
        return f"{'; '.join(machines)}, with {'; '.join(sorted(versions - {''})) or 'versions not recorded'}"

    def row(self, method: str) -> Row | None:
        """The first row of a method, in the recipe's order."""
        rows = self.comparison.rows if self.comparison else ()
        return next((row for row in rows if method in row.method.split("+")), None)

    @cached_property
    def figures(self) -> tuple[Drawing, ...]:
        drawn: list[Drawing | None] = []
        results = [run.result for run in self.runs]
        if self.comparison is not None:
            drawn.append(runs_figure(self.comparison, f"{self.key}-runs"))
            drawn.append(cost_figure(self.comparison.rows, self.metric, f"{self.key}-cost"))
            order = [row.label for row in self.comparison.rows]  # colours agree between figures
            labels = [*order, *dict.fromkeys(run.label for run in self.runs if run.label not in order)]
            results = [run.result for label in labels for run in self.runs if run.label == label]
        drawn.append(curves_figure(results, self.metric, f"{self.key}-curves"))
        return tuple(drawing for drawing in drawn if drawing is not None)

    @cached_property
    def plans(self) -> Mapping[str, Plan]:
        """By label the first plan that can be read; files may hold anything."""
        found: dict[str, Plan] = {}
        for run in self.runs:
            with suppress(ReplearnError):
                if run.label not in found:
                    found[run.label] = Plan.from_json(json.dumps(run.result.plan))
        return found

    @property
    def deployed(self) -> Mapping[str, float]:
        """By label: parameters once deployed, as a share of E2E's; none of a plan that can't be read."""
        shares = {run.label: 1.0 for run in self.runs if not run.result.plan}
        for label, plan in self.plans.items():
            if plan.deployed_before and plan.deployed_after:
                shares[label] = plan.deployed_after / plan.deployed_before
        return shares


def sections_of(collection: Collection) -> list[Section]:
    """One section for each recipe, data set and folder, in the order of the folders."""
    groups: dict[tuple[Path, str, str], list[RunFile]] = defaultdict(list)
    for run in collection.runs:
        groups[run.group, str(run.result.recipe.get("name", "?")), run.result.data].append(run)
    keys: Counter[str] = Counter()
    found = [_section(*group, runs, keys) for group, runs in groups.items()]
    often = Counter(section.title for section in found)
    folders = [f" ({section.folder.as_posix()})" if often[section.title] > 1 else "" for section in found]
    return [replace(section, title=section.title + end) for section, end in zip(found, folders, strict=True)]


def _section(folder: Path, name: str, data: str, runs: Sequence[RunFile], keys: Counter[str]) -> Section:
    key = slug(f"{name}-{data}") or "runs"
    keys[key] += 1
    key += f"-{keys[key]}" if keys[key] > 1 else ""
    comparison, problem = None, ""
    try:
        (comparison,) = compare([run.result for run in runs])
    except (ReplearnError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        own = isinstance(error, ReplearnError)
        problem = str(error) if own else f"These runs can't be compared: {type(error).__name__}: {error}."
    about = runs[0].result.recipe
    return Section(
        key=key,
        title=f"{name} on {data}: {about['model']}, {about['epochs']} epoch{'' if about['epochs'] == 1 else 's'}",
        recipe=name,
        data=data,
        folder=folder,
        runs=tuple(runs),
        comparison=comparison,
        problem=problem,
    )
