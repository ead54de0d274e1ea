"""One fold a comparison: what was reached beside the paper's, figures, costs, how to make it again, every run."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ... import recipes
from ...training.comparable import differences
from ...training.compare import Row
from ...training.comparison_table import cost_columns, ratio, score_columns, signed, spread
from ...training.intervals import Difference
from ...training.recipe import slug
from ..collecting import RunFile
from ..examples import as_address
from ..markup import Content, Raw, columns, command, counted, fold, join, table, tag
from ..sections import Section
from ..svg import series_roles
from . import Entry, View, figures, folded

ORDER = 30
MOST_RUNS = 60  # of one section, in its list of runs


def entries(view: View) -> Iterator[Entry]:
    for section in view.sections:
        labels = dict.fromkeys(str(run.result.variant["label"]) for run in section.runs)
        words = " ".join([*labels, section.folder.as_posix()])
        chip = f"{len(section.running)} in progress" if section.running else ""
        about = (section.key, section.title, words, sentence(section))
        yield folded(*about, *_inside(section), chip=chip, opened=view.opened)


def sentence(section: Section) -> str:
    """What the section comes to, in one line: the rows with Replacement Learning against both baselines."""
    if section.comparison is None:
        return section.problem
    rows = [row for row in section.comparison.rows if "repl" in row.method] or list(section.comparison.rows)
    phrases = []
    for row in rows[:3]:
        parts = [f"{row.label} {spread(row.score, row.std)} {section.metric.unit or section.metric.name}"]
        for name, found in (("E2E", row.against_e2e), ("removal", row.against_removal)):
            if found is not None:
                parts.append(f"{found.verdict} against {name} ({signed(found.mean)})")
        phrases.append(", ".join(parts))
    return "; ".join(phrases)


def _inside(section: Section) -> Iterator[Raw]:
    comparison = section.comparison
    if comparison is not None:
        yield reached_table(section)
        if section.problem:
            yield tag("p", section.problem, class_="note")
    yield figures(section.figures)
    if section.examples is not None:
        about = "Test pictures with what is in them, and with what each method found (its first seed)."
        sheet = tag("img", src=as_address(section.examples), alt=about, loading="lazy")
        yield tag("figure", sheet, tag("figcaption", about), id=f"{section.key}-examples")
    if section.plans:
        yield join(tag("h3", "Plans"), tag("ul", *(tag("li", plan) for plan in section.plans)))
    if comparison is not None:
        shares = [ratio(section.deployed.get(row.label)) for row in comparison.rows]
        cells: dict[str, Sequence[Content]] = {**cost_columns(comparison.rows), "deployed share": shares}
        cells["method"] = labels_of(comparison.rows)
        yield join(tag("h3", "Costs"), columns(cells, f"costs of {section.title}"))
        yield from (tag("p", note, class_="note") for note in comparison.notes[:20])
    groups: dict[str, list[RunFile]] = defaultdict(list)
    for run in section.runs:
        groups[str(run.result.variant["label"])].append(run)
    again = [join(tag("dt", label), tag("dd", command(command_of(runs)))) for label, runs in groups.items()]
    made = f"Trained on {section.made_with}. Files: {section.folder.as_posix()}"
    yield fold("How to make each row again", tag("dl", *again), tag("p", made, class_="quiet"))
    yield fold(f"Every run ({len(section.runs)})", runs_table(section), open_=comparison is None)


def reached_table(section: Section) -> Raw:
    """The verdicts first, which a phone shows; then spread, other metrics, and the paper's number."""
    assert section.comparison is not None
    rows, metric = section.comparison.rows, section.metric
    cells: dict[str, Sequence[Content]] = {
        "method": labels_of(rows),
        metric.title.removeprefix("test "): [tag("b", spread(row.score, row.std)) for row in rows],
        "against E2E": [difference(row.against_e2e) for row in rows],
        "against removal": [difference(row.against_removal) for row in rows],
    }
    rest = {head: cell for head, cell in score_columns(rows, metric).items() if head not in (*cells, metric.name)}
    return columns({**cells, **rest}, f"what was reached by {section.title}")


def labels_of(rows: Sequence[Row]) -> list[Content]:
    roles = series_roles([row.method for row in rows])
    return [
        join(tag("span", "", class_=f"dot b-{role}"), row.label) for row, role in zip(rows, roles, strict=True)
    ]


def difference(value: Difference | None) -> Raw | str:
    """The verdict in words and colour, the mean difference, and its 95 % interval."""
    if value is None:
        return ""
    interval = "1 seed" if len(value.seeds) == 1 else "no spread"
    if value.low is not None and value.high is not None:
        interval = f"[{signed(value.low)}, {signed(value.high)}]"
    verdict = tag("span", value.verdict, class_=f"verdict {value.verdict}")
    shown = tag("span", interval, class_="interval")
    return tag("span", verdict, f" {signed(value.mean)} ", shown, class_="difference")


def runs_table(section: Section) -> Raw:
    rows = []
    for run in section.runs[:MOST_RUNS]:
        result = run.result
        done, epochs = len(result.epochs), int(result.recipe["epochs"])
        last = section.metric.at(result.last.measures) if result.epochs else None
        bar = tag("progress", value=str(min(done, epochs)), max=str(max(epochs, 1)), aria_label="epochs done")
        state = "finished" if result.finished else join(bar, f" {done} of {epochs} epochs")
        numbers = ("" if last is None else f"{last:.2f}", f"{result.epoch_seconds:.2f}")
        where = (result.started, run.path.as_posix(), "; ".join(result.notes))
        rows.append((str(result.variant["label"]), str(result.seed), state, *numbers, *where))
    heads = ("method", "seed", "state", section.metric.name, "s/epoch", "started", "file", "notes")
    rest = len(section.runs) - MOST_RUNS
    more = [tag("p", f"and {counted(rest, 'more run')}, in the same tables and figures.")] if rest > 0 else []
    return join(table(heads, rows, "runs"), *more)


def command_of(runs: Sequence[RunFile]) -> str:
    """The command for the runs of one row; for what no shipped recipe has, by the `recipe.json` beside them."""
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
    runs = [[seed for _, seed in run] for _, run in groupby(enumerate(seeds), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
