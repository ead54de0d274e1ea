"""The comparisons of a report as plain data: one for each recipe, data set and folder.

With its figures, its plans in words, and the sizes that models deploy to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from ..training.comparable import machine
from ..training.compare import Comparison, Row, compare
from ..training.metrics import Metric
from ..training.recipe import slug
from ..training.results import Result
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
    metric: Metric
    runs: tuple[RunFile, ...]
    comparison: Comparison | None  # None while nothing is finished, or where the runs can't be compared
    problem: str  # why there is no comparison
    figures: tuple[Drawing, ...]
    plans: tuple[str, ...]
    deployed: Mapping[str, float]  # by label: parameters once deployed, as a share of E2E's

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
    results = [run.result for run in runs]
    metric = results[0].metric
    comparison, problem = None, ""
    try:
        (comparison,) = compare(results)
    except (ReplearnError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        own = isinstance(error, ReplearnError)
        problem = str(error) if own else f"These runs can't be compared: {type(error).__name__}: {error}."
    figures: list[Drawing | None] = []
    if comparison is not None:
        variants = {str(result.variant["label"]): result.variant for result in results}
        order = {row.label: place for place, row in enumerate(comparison.rows)}  # colours agree between figures
        results.sort(key=lambda result: order.get(str(result.variant["label"]), len(order)))
        figures.append(runs_figure(comparison, f"{key}-runs"))
        figures.append(cost_figure(comparison.rows, variants, metric, f"{key}-cost"))
    figures.append(curves_figure(results, metric, f"{key}-curves"))
    deployed = {str(result.variant["label"]): deployed_share(result) for result in results}
    about = results[0].recipe
    return Section(
        key=key,
        title=f"{name} on {data}: {about['model']}, {about['epochs']} epoch{'' if about['epochs'] == 1 else 's'}",
        recipe=name,
        data=data,
        folder=folder,
        metric=metric,
        runs=tuple(runs),
        comparison=comparison,
        problem=problem,
        figures=tuple(figure for figure in figures if figure is not None),
        plans=tuple(plans_of(results)),
        deployed={label: share for label, share in deployed.items() if share is not None},
    )


def plans_of(results: Sequence[Result]) -> list[str]:
    """Each plan that differs in words; rows that share one are named together."""
    labels: dict[str, list[str]] = {}
    for result in results:
        held, label = labels.setdefault(plan_in_words(result), []), str(result.variant["label"])
        held += [label] if label not in held else []
    return [f"{', '.join(held)}: {words}" for words, held in labels.items() if words]


def deployed_share(result: Result) -> float | None:
    """The deployed parameters over those of the model before its plan; None where the plan has no count."""
    if not result.plan:
        return 1.0
    with suppress(KeyError, TypeError, ZeroDivisionError, OverflowError):  # files may hold anything
        return float(result.plan["deployed_after"] / result.plan["deployed_before"])
    return None


def plan_in_words(result: Result) -> str:
    """Which blocks a run's plan replaces, and by what; empty where it has none, or is not of its form."""
    plan: Any = result.plan
    try:
        blocks: dict[str, list[str]] = {}
        for target in plan["targets"]:
            blocks.setdefault(operator_of(target), []).append(target["name"])
        parts = [f"{', '.join(names)} by {operator}" for operator, names in blocks.items()]
        parts += [f"{entry['name']} kept ({entry['reason']})" for entry in plan["skipped"]]
        share = f"{len(plan['targets'])} of {plan['num_blocks']} blocks replaced"
        return f"{share} ({plan['placement']}): {'; '.join(parts)}."
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""


def operator_of(target: Mapping[str, Any]) -> str:
    options = target["operator"]
    given = (options.get(key) for key in ("sources", "correction"))
    extra = [str(value) for value in given if value not in (None, "both", "none")]
    return str(options["name"]).replace("_", " ") + (f" ({', '.join(extra)})" if extra else "")
