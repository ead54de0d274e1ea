"""The comparisons of the page: a card each and a table of all, and one fold each with everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ..training.compare import Row
from ..training.comparison_table import cost_columns, interval, ratio, score_columns, signed, spread
from ..training.intervals import Difference
from .figures import in_words
from .markup import (
    Content,
    Entry,
    Raw,
    breakable,
    card,
    columns,
    counted,
    figures,
    fold,
    folded,
    join,
    table,
    tag,
    trained_by,
    verdict,
)
from .sections import Section
from .svg import series_roles

MOST_RUNS = 60  # of one section, in its list of runs
LEGEND = """\
RepL is the recipe's first row of that method. Scores are those of the last epoch, mean ± standard deviation over
seeds; differences are taken seed by seed, with the 95 % interval of their mean. Better and worse: p < 0.05 in a
paired t-test, p corrected by Holm's method for all differences of the comparison; all else is undecided, which is
not equal. Deployed: parameters once operators are plain layers, over E2E's."""
COSTS = tag("p", "Time, memory and share (of the parameters, deployed too) are ratios to E2E.", class_="quiet")


def summary(sections: Sequence[Section]) -> Iterator[Entry]:
    """Comparisons that have a row with Replacement Learning; the first such row stands for each."""
    found = [(section, row) for section in sections if (row := section.row("repl")) is not None]
    if found:
        lines = [_line(section, row) for section, row in found]
        cells = {head: [line[head] for line in lines] for head in lines[0]}
        cards = [_card(*each, line) for each, line in zip(found, lines, strict=True)]
        shown = columns(cells, "every comparison: RepL against E2E and removal")
        note = tag("p", LEGEND, class_="quiet")
        yield card("summary", "Summary", tag("div", *cards, class_="cards"), shown, note)


def _line(section: Section, row: Row) -> dict[str, Content]:
    """A comparison in the table of all; its card has the same numbers."""
    full, removal = (section.row(method) for method in ("e2e", "removal"))
    return {
        "comparison": tag("a", breakable(section.title), href=f"#{section.key}"),
        "against E2E": difference(row.against_e2e),
        "against removal": difference(row.against_removal),
        "RepL": tag("b", spread(row.score, row.std)),
        "removal": spread(removal.score, removal.std) if removal else "",
        "E2E": spread(full.score, full.std) if full else "",
        "time": ratio(row.time_ratio),
        "memory": ratio(row.memory_ratio),
        "deployed": ratio(section.deployed.get(row.label)),
    }


def _card(section: Section, row: Row, line: Mapping[str, Content]) -> Raw:
    reached = join(*([line["E2E"], " → "] if line["E2E"] else []), spread(row.score, row.std))
    facts = {f"{section.metric.title.removeprefix('test ')}{': E2E → RepL' if line['E2E'] else ''}": reached}
    for name in ("time", "memory", "deployed"):
        facts[f"{name} / E2E"] = join(line[name] or tag("span", "not measured", class_="quiet"))
    values = tag("dl", *(tag("div", tag("dt", name), tag("dd", fact)) for name, fact in facts.items()))
    against = {
        name: found for name, found in (("E2E", row.against_e2e), ("removal", row.against_removal)) if found
    }
    told = [tag("p", verdict(held.verdict), f" {row.label} against {name}") for name, held in against.items()]
    head = tag("h3", line["comparison"])
    return tag("article", head, *told, values, class_="card small", data_words=words_of(section))


def entries(sections: Sequence[Section], opened: bool) -> Iterator[Entry]:
    for section in sections:
        chip = f"{len(section.running)} in progress" if section.running else ""
        about = (section.key, section.title, words_of(section), sentence(section))
        yield folded(*about, *_inside(section), chip=chip, opened=opened)


def words_of(section: Section) -> str:
    """What the filter finds a comparison by."""
    labels = dict.fromkeys(run.label for run in section.runs)
    return " ".join([section.title, *labels, section.folder.as_posix()]).lower()


def sentence(section: Section) -> str:
    """What the section comes to, in one line: the rows with Replacement Learning, or all."""
    if section.comparison is None:
        return section.problem
    rows = [row for row in section.comparison.rows if "repl" in row.method] or section.comparison.rows
    more = f"; {len(rows) - 2} more" if len(rows) > 2 else ""
    return "; ".join(in_words(row, removal=True) for row in rows[:2]) + more


def _inside(section: Section) -> Iterator[Raw]:
    comparison = section.comparison
    if comparison is not None:
        yield reached_table(section)
        if section.problem:
            yield tag("p", section.problem, class_="note")
    yield figures(section.figures)
    if section.plans:
        plans = defaultdict(list)
        for label, plan in section.plans.items():
            plans[str(plan)].append(label)
        shown = (join(tag("h4", ", ".join(labels)), tag("pre", plan)) for plan, labels in plans.items())
        yield fold("Plans", *shown)
    if comparison is not None:
        shares = [ratio(section.deployed.get(row.label)) for row in comparison.rows]
        cells: dict[str, Sequence[Content]] = {
            **cost_columns(comparison.rows),
            "method": labels_of(comparison.rows),
            "deployed share": shares,
        }
        yield join(tag("h3", "Costs"), columns(cells, f"costs of {section.title}"), COSTS)
        yield from (tag("p", note, class_="note") for note in comparison.notes[:20])
    recipes = [f"replearn compare {(run.path.parent / 'recipe.json').as_posix()}" for run in section.runs]
    pairs = zip(section.runs, recipes, strict=True)  # no command is recorded of a run that Python started
    commands = dict.fromkeys(run.result.command or recipe for run, recipe in pairs)
    made = f"Trained on {section.made_with}. Files: {section.folder.as_posix()}"
    yield trained_by(list(commands), tag("p", made, class_="quiet"))
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
    """The verdict in words and colour, the mean difference, its 95 % interval and the p that decides."""
    if value is None:
        return ""
    parts = [interval(value)] + ([] if value.corrected is None else [f"p {value.corrected:.3f}"])
    shown = tag("span", " ".join(part.replace(" ", "\u00a0") for part in parts), class_="interval")
    return tag("span", verdict(value.verdict), f" {signed(value.mean)} ", shown, class_="difference")


def minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def runs_table(section: Section) -> Raw:
    rows = []
    for run in section.runs[:MOST_RUNS]:
        result = run.result
        done, epochs = len(result.epochs), int(result.recipe["epochs"])
        last = section.metric.at(result.last.measures) if result.epochs else None
        bar = tag("progress", value=str(min(done, epochs)), max=str(max(epochs, 1)), aria_label="epochs done")
        state = "finished" if result.finished else join(bar, f" {done} of {epochs} epochs")
        numbers = ("" if last is None else f"{last:.2f}", f"{result.epoch_seconds:.2f}")
        where = (minute(result.started), run.path.as_posix(), "; ".join(result.notes))
        rows.append((run.label, str(result.seed), state, *numbers, *where))
    heads = ("method", "seed", "state", section.metric.name, "s/epoch", "started", "file", "notes")
    rest = len(section.runs) - MOST_RUNS
    more = [tag("p", f"and {counted(rest, 'more run')}, in the same tables and figures.")] if rest > 0 else []
    return join(table(heads, rows, "runs"), *more)
