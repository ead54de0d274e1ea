"""What the comparisons come to: a card each, RepL against E2E, and all of them in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...training.compare import Row
from ...training.comparison_table import ratio, spread
from ..kinds import Measured
from ..markup import Content, Raw, columns, join, tag
from ..sections import Section
from . import Entry, View, card
from .comparisons import difference

ORDER = 10
LEGEND = """\
RepL is the recipe's first row of that method. Scores are those of the last epoch, mean ± standard deviation over
seeds; differences are taken seed by seed, with the 95 % interval of their mean. Undecided: the interval contains
0. Deployed: parameters once operators are plain layers, over E2E's."""
Cost = tuple[float | None, float | None, str]  # time and memory over E2E's, and where they were measured


def entries(view: View) -> Iterator[Entry]:
    """Comparisons that have a row with Replacement Learning; the first such row stands for each."""
    found = [(section, row) for section in view.sections if (row := section.row("repl")) is not None]
    if not found:
        return
    costs = [cost_of(section, row, view.measured) for section, row in found]
    cards = [_card(section, row, cost) for (section, row), cost in zip(found, costs, strict=True)]
    cells: dict[str, list[Content]] = {
        "comparison": [join(tag("a", section.title, href=f"#{section.key}")) for section, _ in found],
        "against E2E": [difference(row.against_e2e) for _, row in found],
        "against removal": [difference(row.against_removal) for _, row in found],
        "RepL": [tag("b", spread(row.score, row.std)) for _, row in found],
        "removal": [_score(section.row("removal")) for section, _ in found],
        "E2E": [_score(section.row("e2e")) for section, _ in found],
        "time": [ratio(time) for time, _, _ in costs],
        "memory": [ratio(memory) for _, memory, _ in costs],
        "deployed": [ratio(section.deployed.get(row.label)) for section, row in found],
    }
    table = columns(cells, "every comparison: RepL against E2E and removal")
    yield card("summary", "Summary", tag("div", *cards, class_="cards"), table, tag("p", LEGEND, class_="quiet"))


def _score(row: Row | None) -> str:
    return spread(row.score, row.std) if row else ""


def cost_of(section: Section, row: Row, measured: Sequence[Measured]) -> Cost:
    """Of the runs themselves, or of a benchmark of the same recipe where the runs shared their device."""
    if row.time_ratio is not None:
        return row.time_ratio, row.memory_ratio, ""
    for entry in measured:
        if found := entry.found.costs.get((section.recipe, section.data, row.label)):
            return *found, entry.key
    return None, None, ""


def _card(section: Section, row: Row, cost: Cost) -> Raw:
    against, (time, memory, key) = row.against_e2e, cost
    verdict = against.verdict if against else "no E2E"
    full = section.row("e2e")
    reached = f"{_score(full)} → {_score(row)}" if full else _score(row)
    facts = {section.metric.title.removeprefix("test "): reached}
    shares = {"time": time, "memory": memory, "deployed size": section.deployed.get(row.label)}
    for name, value in shares.items():
        facts[name] = "not measured" if value is None else f"{value:.2f} of E2E"
    values = tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()))
    head = tag("h3", tag("a", section.title, href=f"#{section.key}"))
    chip = tag("p", tag("span", verdict, class_=f"verdict {verdict}"), f" {row.label} against E2E")
    source = [tag("p", "Costs by ", tag("a", "a benchmark", href=f"#{key}"), class_="quiet")] if key else []
    return tag("article", head, chip, values, *source, class_="card small", data_words=section.title.lower())
