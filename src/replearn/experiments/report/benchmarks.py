"""Files that `replearn bench` writes: a fold each, with a figure, a table and the command.

`KINDS` has the forms of these files. A kind reads a file's data into ratios; all else is the same for every kind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import recipes
from ..bench.inference import FORMAT as INFERENCE
from ..bench.record import FORMAT as STEPS
from ..training.compare import paper_ratio
from ..training.comparison_table import ratio
from ..training.recipe import slug
from .chart import Case, Dot, dot_figure
from .collecting import Other
from .markup import Entry, columns, command, figures, fold, folded, tag
from .svg import Drawing, series_roles

BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
MOST = 200  # files
MOST_ROWS = 24  # a longer table is folded


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One ratio with its quartiles: a dot of the figure and a line of the table."""

    group: str  # a heading of the figure
    case: str  # a line of the figure below it
    label: str  # a colour
    value: Mapping[str, float]
    paper: float | None  # the paper's number for the same
    cells: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Kind:
    title: str
    what: str  # the horizontal axis
    about: str
    read: Callable[[Mapping[str, Any]], Iterator[Ratio]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One file, shown."""

    key: str
    title: str  # unique in a report
    sentence: str  # what it comes to, in one line
    about: str  # how to read the table
    kind: Kind
    ratios: tuple[Ratio, ...]
    figure: Drawing
    path: Path
    made_on: str
    command: str


def steps(data: Mapping[str, Any]) -> Iterator[Ratio]:
    """Training steps: time and memory of every candidate over E2E's."""
    for entry in data["training"]:
        for row in entry["rows"]:
            if (label := row["label"]) == "E2E":
                continue
            time, memory = paper_costs(str(entry["case"]["model"])) if label == "RepL" else (None, None)
            cells = {
                "model": entry["title"],
                "backend": entry["backend"],
                "row": label,
                **verdict("time", row["time"], lower=True),
                "paper: time": ratio(time),
                "memory": ratio(row["memory_ratio"]),
                "paper: memory": ratio(memory),
            }
            place = {"group": entry["title"], "case": entry["backend"], "label": label}
            yield Ratio(**place, value=row["time"], paper=time, cells=cells)


def paper_costs(model: str) -> tuple[float | None, float | None]:
    """The paper's time and memory of RepL over E2E's; None where it prints none."""
    for recipe in map(recipes.recipe, recipes.available()):
        rows = {row.label: row for row in recipe.paper if row.data == recipe.data[0] and row.seconds_per_epoch}
        e2e, repl = rows.get("E2E"), rows.get("RepL") or rows.get("RepL first=2")
        if recipe.model == model and e2e and repl:
            return paper_ratio(repl, e2e, "seconds_per_epoch"), paper_ratio(repl, e2e, "memory_gb")
    return None, None


def inference(data: Mapping[str, Any]) -> Iterator[Ratio]:
    """Inference: how many times as fast the deployed model is as E2E, and as the model before deploying."""
    for row in data["rows"]:
        paper = {"RepL dynamic" if "dynamic" in table else "E2E": table for table in row["paper"]}
        for base in ("E2E", "RepL dynamic"):
            if (value := row["speedup"].get(f"RepL deployed against {base}")) is None:
                continue
            printed = row["paper"][paper[base]]["speedup"] if base in paper else None
            cells = {
                "model": row["model"],
                "batch": str(row["batch"]),
                "backend": row["backend"],
                "against": base,
                **verdict("speedup", value, lower=False),
                "paper": ratio(printed),
                "table": paper.get(base, ""),
            }
            place = {"group": row["model"], "case": f"{row['backend']}, batch {row['batch']}"}
            yield Ratio(**place, label=f"against {base}", value=value, paper=printed, cells=cells)


def verdict(name: str, value: Mapping[str, float], *, lower: bool) -> dict[str, str]:
    """On which side of 1 the quartiles of a ratio lie, and the ratio with them."""
    low, high = value["low"], value["high"]
    word = "undecided" if low <= 1 <= high else "better" if (high < 1) == lower else "worse"
    return {"verdict": word, name: f"{value['median']:.3f} [{low:.3f}, {high:.3f}]"}


KINDS = {
    STEPS: Kind(
        title="Time and memory of a training step",
        what="time of a step, ratio to E2E",
        about="Shares of E2E, taking turns in one process, with quartiles over rounds.",
        read=steps,
    ),
    INFERENCE: Kind(
        title="Inference of the deployed model",
        what="speedup of the deployed model",
        about="How many times as fast as E2E, or as the model before deploying, with quartiles over rounds.",
        read=inference,
    ),
}


def measured_in(others: Sequence[Other]) -> tuple[list[Measured], list[tuple[Path, str]]]:
    """The files of a known kind, shown, and the paths of all others with the reason."""
    known: list[Measured] = []
    rest: list[tuple[Path, str]] = []
    for other in others:
        data = other.data if isinstance(other.data, dict) else {}
        kind = KINDS.get(str(data.get("format"))) if data.get("training") or data.get("rows") else None
        if kind is None or len(known) >= MOST:
            rest.append((other.path, "measurements of a kind that a report does not show"))
            continue
        try:
            known.append(shown(kind, other))
        except BROKEN as error:
            rest.append((other.path, f"looks like {kind.read.__name__}, but {error!r}"))
    often = Counter(entry.title for entry in known)
    return [
        replace(entry, title=f"{entry.title} ({entry.path.stem})") if often[entry.title] > 1 else entry
        for entry in known
    ], rest


def shown(kind: Kind, file: Other) -> Measured:
    data, ratios = file.data, tuple(kind.read(file.data))
    key = f"measured-{slug(file.path.with_suffix('').as_posix()) or 'file'}"
    repl = [each.value["median"] for each in ratios if each.label in ("RepL", "against E2E")]
    hardware, versions = data["hardware"], data["versions"]
    machine = str(hardware.get("gpu") or f"{hardware['device']}, {hardware.get('threads', '?')} threads")
    stopped = "" if data.get("finished", True) else " It was stopped before its end: these are its first rows."
    return Measured(
        key=key,
        title=kind.title,
        sentence=f"{kind.what}: RepL {min(repl):.2f} to {max(repl):.2f} in {len(repl)} cases",
        about=kind.about + stopped,
        kind=kind,
        ratios=ratios,
        figure=ratio_figure(kind, ratios, f"{key}-ratio"),
        path=file.path,
        made_on=", ".join([machine, *(f"{name} {number}" for name, number in versions.items())]),
        command=str(data.get("command", "")),
    )


def ratio_figure(kind: Kind, ratios: Sequence[Ratio], name: str) -> Drawing:
    """A line a case with its ratios, below a heading for each group; the rule is 1."""
    labels = list(dict.fromkeys(each.label for each in ratios))
    roles = dict(zip(labels, series_roles([label.lower() for label in labels]), strict=True))
    groups: dict[str, dict[str, list[Dot]]] = defaultdict(lambda: defaultdict(list))
    for each in ratios:
        tip = f"{each.group}, {each.case}\n{each.label}"
        dots = groups[each.group][each.case]
        dots.append(Dot.of(each.value, roles[each.label], tip))
        if each.paper:
            dots.append(Dot.printed(each.paper, roles[each.label], f"{tip}, in the paper"))
    cases: list[Case] = []
    for group, lines in groups.items():
        cases += [Case(label=group), *(Case(label=line, dots=tuple(dots)) for line, dots in lines.items())]
    return dot_figure(
        cases,
        name=name,
        title=kind.what.partition(",")[0].capitalize(),
        about=f"{kind.what}; the rule is 1. Dashed rings are the paper's.",
        x_title=kind.what,
        rule=(1.0, "1"),
        legend_of=[(role, label, "dot") for label, role in roles.items()],
    )


def entries(measured: Sequence[Measured], opened: bool) -> Iterator[Entry]:
    for found in measured:
        heads = found.ratios[0].cells
        made = columns({head: [each.cells[head] for each in found.ratios] for head in heads}, found.title)
        rows = len(found.ratios)
        parts = [
            tag("p", found.about, class_="quiet"),
            figures([found.figure]),
            fold(f"Every number ({rows} rows)", made) if rows > MOST_ROWS else made,
            *([tag("p", command(found.command))] if found.command else []),
            tag("p", f"Measured on {found.made_on}. File: {found.path.as_posix()}", class_="quiet"),
        ]
        yield folded(found.key, found.title, found.path.as_posix(), found.sentence, *parts, opened=opened)
