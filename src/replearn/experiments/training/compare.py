"""Compare finished runs: mean and spread over seeds, paired differences, costs, and the paper's numbers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ...errors import ReplearnError
from ...planning.serialization import decode, encode
from .comparable import changes_of, check_same_settings, machine, shared
from .intervals import Difference, corrected, paired_difference, std_of
from .methods import has_targets
from .metrics import Metric
from .recipe import PaperRow
from .results import Result
from .tasks import task_named


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method over its seeds. Scores are those of the last epoch; `best` is the mean of the best epochs."""

    label: str
    method: str
    seeds: tuple[int, ...]
    epochs: int
    scores: tuple[float, ...]  # by seed
    score: float
    std: float | None
    best: float
    also: Mapping[str, float]  # the means of the task's other metrics, by name
    against_e2e: Difference | None
    against_removal: Difference | None  # against removal of the same targets
    alone: bool  # False if all runs shared their device, so that time and memory mean nothing
    seconds: float  # of an epoch, without evaluation
    memory: int  # bytes at the peak; 0 where the device can't tell
    parameters: int
    flops: int
    time_ratio: float | None  # to E2E on the same hardware
    memory_ratio: float | None
    paper: PaperRow | None
    paper_time_ratio: float | None
    paper_memory_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of one recipe on one data set."""

    recipe: str
    data: str
    model: str
    epochs: int
    metric: Metric
    hardware: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return encode(self)


def compare(results: Iterable[Result]) -> list[Comparison]:
    """One comparison for each recipe and data set among the results, in their order.

    Unfinished runs are left out and named in the notes. ReplearnError for runs with different settings, and for
    the same run twice.
    """
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[str(result.recipe.get("name", "?")), result.data].append(result)
    if not groups:
        raise ReplearnError("There are no results to compare: train something first (replearn compare RECIPE).")
    return [_compare_group(name, data, group) for (name, data), group in groups.items()]


def _compare_group(name: str, data: str, group: Sequence[Result]) -> Comparison:
    done = [result for result in group if result.finished and result.epochs]
    notes = [
        f"{result.variant['label']}, seed {result.seed}, stopped after {len(result.epochs)} epochs: left out"
        for result in group
        if result not in done
    ]
    if not done:
        raise ReplearnError(
            f"No run of {name} on {data} is finished ({'; '.join(notes)}). Finish them with "
            f"`replearn compare {name} --data {data}`."
        )
    by_label: dict[str, dict[int, Result]] = defaultdict(dict)
    for result in done:
        runs = by_label[str(result.variant["label"])]
        if result.seed in runs:
            raise ReplearnError(
                f"There are two results of {result.variant['label']} with seed {result.seed} for {name} on "
                f"{data}. Compare one folder of runs at a time."
            )
        runs[result.seed] = result
    check_same_settings(name, done)
    order = [str(variant["label"]) for variant in done[0].recipe.get("variants", ())]
    labels = sorted(by_label, key=lambda label: order.index(label) if label in order else len(order))
    rows = judged([_row(by_label[label], by_label) for label in labels])
    machines = sorted({machine(result) for result in done})
    if len(machines) > 1:
        notes.append(f"trained on different hardware: time and memory are compared within {' or '.join(machines)}")
    if any(shared(result) for result in done):
        notes.append("runs that shared a device have no time or memory of their own: run those with --together 1")
    return Comparison(
        recipe=name,
        data=data,
        model=str(done[0].recipe["model"]),
        epochs=int(done[0].recipe["epochs"]),
        metric=done[0].metric,
        hardware=", ".join(machines),
        rows=rows,
        notes=(*notes, *changes_of(done[0].recipe)),
    )


def judged(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with verdicts that are corrected for all differences among them."""
    family = [each for row in rows for each in (row.against_e2e, row.against_removal) if each is not None]
    again = iter(corrected(family))
    return tuple(
        replace(
            row,
            against_e2e=next(again) if row.against_e2e else None,
            against_removal=next(again) if row.against_removal else None,
        )
        for row in rows
    )


def _row(runs: Mapping[int, Result], others: Mapping[str, Mapping[int, Result]]) -> Row:
    seeds = tuple(sorted(runs))
    first = runs[seeds[0]]
    label, method = str(first.variant["label"]), str(first.variant["method"])
    e2e = _baseline(others, "e2e", None)
    removal = _baseline(others, "removal", first) if has_targets(method) else None
    paper = _paper(first, label)
    paper_e2e = _paper(first, str(next(iter(e2e.values())).variant["label"])) if e2e else None
    scores = tuple(runs[seed].score for seed in seeds)
    alone, full = ([run for run in each.values() if not shared(run)] for each in (runs, e2e or {}))
    seconds, memory = _cost(alone or list(runs.values()))
    alike = alone and full and len({machine(run) for run in (*alone, *full)}) == 1
    full_seconds, full_memory = _cost(full) if alike else (0.0, 0)
    task = task_named(str(first.recipe.get("task", "classification")))
    return Row(
        label=label,
        method=method,
        seeds=seeds,
        epochs=first.last.epoch,
        scores=scores,
        score=fmean(scores),
        std=std_of(scores),
        best=fmean([run.best.measures[run.metric.key] for run in runs.values()]),
        also={other.name: fmean([run.last.measures[other.key] for run in runs.values()]) for other in task.also},
        against_e2e=_against(runs, e2e),
        against_removal=_against(runs, removal),
        alone=bool(alone),
        seconds=seconds,
        memory=memory,
        parameters=first.parameters,
        flops=first.flops,
        time_ratio=seconds / full_seconds if full_seconds else None,
        memory_ratio=memory / full_memory if full_memory else None,
        paper=paper,
        paper_time_ratio=paper_ratio(paper, paper_e2e, "seconds_per_epoch"),
        paper_memory_ratio=paper_ratio(paper, paper_e2e, "memory_gb"),
    )


def _baseline(
    others: Mapping[str, Mapping[int, Result]], method: str, like: Result | None
) -> Mapping[int, Result] | None:
    """The first row of this method; with `like`, of the same placement and length."""
    for runs in others.values():
        first = next(iter(runs.values()))
        if first.variant["method"] == method and (like is None or _placement(first) == _placement(like)):
            return runs
    return None


def _placement(result: Result) -> tuple[int, int, int | None]:
    variant = result.variant
    first = variant["interval"] if variant["first"] is None else variant["first"]
    return variant["interval"], first, variant.get("epochs")


def _against(runs: Mapping[int, Result], baseline: Mapping[int, Result] | None) -> Difference | None:
    if baseline is None or baseline is runs:
        return None
    ours, theirs = ({seed: run.score for seed, run in each.items()} for each in (runs, baseline))
    metric = next(iter(runs.values())).metric
    return paired_difference(ours, theirs, higher_is_better=metric.higher_is_better)


def _cost(runs: Sequence[Result]) -> tuple[float, int]:
    return fmean([run.epoch_seconds for run in runs]), max(run.peak_memory for run in runs)


def _paper(result: Result, label: str) -> PaperRow | None:
    for entry in result.recipe.get("paper", ()):
        if entry["data"] == result.data and entry["label"] == label:
            row: PaperRow = decode(PaperRow, entry, "paper")
            return replace(row, table=row.table or str(result.recipe["table"]))
    return None


def paper_ratio(row: PaperRow | None, full: PaperRow | None, field: str) -> float | None:
    ours, whole = getattr(row, field, None) or 0, getattr(full, field, None) or 0
    return ours / whole if ours > 0 and whole > 0 else None
