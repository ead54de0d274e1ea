"""The tables of a section: what was reached beside the paper's, what it cost, how to make it again, every run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..training.compare import Row
from ..training.comparison_table import cost_columns, score_columns, signed, spread
from ..training.intervals import Difference
from ..training.metrics import Metric
from .collecting import RunFile
from .markup import Content, Raw, columns, join, table, tag
from .reproducing import command_of
from .scene import series_roles
from .sections import Section

MOST_RUNS = 60  # of one section, in its list of runs


def reached_table(section: Section) -> Raw:
    """The metric with its spread, differences with intervals and verdicts, and the paper's number."""
    assert section.comparison is not None
    rows, metric = section.comparison.rows, section.metric
    cells: dict[str, Sequence[Content]] = {
        **score_columns(rows, metric),
        "method": labels_of(rows),
        metric.name: [tag("b", spread(row.score, row.std)) for row in rows],
        "against E2E": [difference(row.against_e2e) for row in rows],
        "against removal": [difference(row.against_removal) for row in rows],
    }
    reached = metric.title.removeprefix("test ")
    named = {reached if head == metric.name else head: column for head, column in cells.items()}
    left = ("method", "against E2E", "against removal")
    return columns(named, left, f"{reached} of {section.recipe} on {section.data}")


def cost_table(rows: Sequence[Row]) -> Raw:
    return columns({**cost_columns(rows), "method": labels_of(rows)}, ("method",), "costs")


def labels_of(rows: Sequence[Row]) -> list[Content]:
    roles = series_roles([row.method for row in rows])
    return [
        join(tag("span", "", class_=f"dot b-{role}"), row.label) for row, role in zip(rows, roles, strict=True)
    ]


def reproduce_list(section: Section) -> Raw:
    """One command a row, to copy."""
    groups: dict[str, list[RunFile]] = defaultdict(list)
    for run in section.runs:
        groups[str(run.result.variant["label"])].append(run)
    entries = [join(tag("dt", label), tag("dd", command(command_of(runs)))) for label, runs in groups.items()]
    return tag("dl", *entries, class_="commands")


def command(text: str) -> Raw:
    return join(tag("code", text), tag("button", "copy", type="button", class_="copy"))


def runs_table(section: Section) -> Raw:
    """Every run: its seed, state, last and best value, its notes and its file."""
    rows = []
    for run in section.runs[:MOST_RUNS]:
        result = run.result
        done, epochs = len(result.epochs), int(result.recipe["epochs"])
        last = section.metric.at(result.last.measures) if result.epochs else None
        rows.append(
            (
                str(result.variant["label"]),
                str(result.seed),
                "finished" if result.finished else join(bar(done, epochs), f" {done} of {epochs} epochs"),
                "" if last is None else f"{last:.2f}",
                f"{result.epoch_seconds:.2f}",
                result.started,
                run.path.as_posix(),
                "; ".join(result.notes),
            )
        )
    heads = ("method", "seed", "state", section.metric.name, "s/epoch", "started", "file", "notes")
    shown = table(heads, rows, (0, 2, 5, 6, 7), "runs")
    rest = len(section.runs) - MOST_RUNS
    return join(shown, tag("p", f"and {rest} more runs, in the same tables and figures.")) if rest > 0 else shown


def bar(done: int, whole: int) -> Raw:
    return tag("progress", value=str(min(done, whole)), max=str(max(whole, 1)), aria_label="epochs done")


def difference(value: Difference | None) -> Raw | str:
    """The mean difference, its 95 % interval, and the verdict in words and colour."""
    if value is None:
        return ""
    if value.low is None or value.high is None:
        interval = "1 seed" if len(value.seeds) == 1 else "no spread"
    else:
        interval = f"[{signed(value.low)}, {signed(value.high)}]"
    return join(
        f"{signed(value.mean)} ",
        tag("span", interval, class_="interval"),
        " ",
        tag("span", value.verdict, class_=f"verdict {value.verdict}"),
    )


def sentence(section: Section) -> str:
    """What the section comes to, in one line: the rows with Replacement Learning against both baselines."""
    if section.comparison is None:
        return section.problem
    rows = [row for row in section.comparison.rows if "repl" in row.method] or list(section.comparison.rows)
    return "; ".join(phrase(row, section.metric) for row in rows[:3])


def phrase(row: Row, metric: Metric) -> str:
    unit = metric.unit or metric.name
    parts = [f"{row.label} {spread(row.score, row.std)} {unit}"]
    for name, found in (("E2E", row.against_e2e), ("removal", row.against_removal)):
        if found is not None:
            parts.append(f"{found.verdict} against {name} ({signed(found.mean)})")
    return ", ".join(parts)
