"""Markdown tables of a results file: the score against images and against seconds, mean and spread over seeds.

    python benchmarks/compress/table.py compress.jsonl

Only methods of equal run time stand in one table: those that leave nothing in a block's place, and those as fast
as a full map or half a block, where peers take out fewer blocks. The best mean of a column is bold. Below each
table stands the best of ours against the best peer, seed by seed, whoever is ahead. Latency and parameters are
shares of the trained network's. Seconds are the wall's; of one thread on a CPU, which others may hold, the
process's.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev

from results import Line, read

LOWER = ("perplexity",)
Column = tuple[str, Callable[[Line], bool]]


def main() -> None:
    print(page([line for path in sys.argv[1:] for line in read(Path(path))]))


def page(lines: Sequence[Line]) -> str:
    """All tables of all subjects, by device and number of test images."""
    groups: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        tested = "all" if line["test_images"] is None else f"the first {line['test_images']:,}"
        groups[line["subject"], line["device"], tested].append(line)
    return "\n".join(section(*key, found) for key, found in groups.items())


def section(subject: str, device: str, tested: str, lines: Sequence[Line]) -> str:
    measured = [line for line in lines if line["kind"] == "method"]
    if not measured:
        return ""
    metric = measured[0]["metric"]
    base = [line["score"] for line in lines if line["kind"] == "trained"]
    text = [f"## {subject}", "", f"{device}, {tested} of the test set; {metric}, trained {spread(base)}.", ""]
    own = [line for line in measured if not limited(line)]
    counts = sorted({line["images"] for line in own})
    if own:
        columns: list[Column] = [(f"{n} samples", partial(holds, "images", n)) for n in counts]
        at = 500 if 500 in counts else counts[-1]
        text += table(own, columns, metric, partial(holds, "images", at), f"seconds ({at})")
    for unit in ("s", "epochs"):
        timed = [line for line in measured if line["budget"].endswith(f" {unit}")]
        budgets = sorted({line["budget"] for line in timed}, key=lambda budget: float(budget.split()[0]))
        for number in sorted({line["images"] for line in timed}):
            some = [line for line in timed if line["images"] == number]
            columns = [(budget, partial(holds, "budget", budget)) for budget in budgets]
            text += [f"At equal {'seconds' if unit == 's' else 'epochs'}, {number:,} samples:", ""]
            last = budgets[-1]
            text += table(some, columns, metric, partial(holds, "budget", last), f"seconds ({last})")
    return "\n".join(text)


def table(
    lines: Sequence[Line], columns: Sequence[Column], metric: str, costed: Callable[[Line], bool], seconds: str
) -> list[str]:
    """Rows are methods, peers first; the last columns are what they cost at one of the budgets."""
    text = []
    for trains, rich in product((False, True), repeat=2):
        group = [line for line in lines if line["trains"] == trains and is_rich(line["method"]) == rich]
        if not group:
            continue
        kind = f"{'with' if trains else 'no'} training, as fast as {'richer forms' if rich else 'removal'}"
        head = [kind, *(name for name, _ in columns)]
        alone = all(line["device"] == "cpu" and line["threads"] == 1 for line in group)
        head += [f"CPU {seconds}" if alone else seconds, "blocks out", "latency", "parameters"]
        text += ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
        names = sorted(dict.fromkeys(line["method"] for line in group), key=lambda name: is_ours(group, name))
        best = [leading(group, chosen, metric) for _, chosen in columns]
        for name in names:
            mine = [line for line in group if line["method"] == name]
            cells = []
            for (_, chosen), first in zip(columns, best, strict=True):
                cell = spread([line["score"] for line in mine if chosen(line)])
                cells.append(f"**{cell}**" if name == first else cell)
            cost = [line for line in mine if costed(line)] or mine
            cells += [
                spread([line["cpu_seconds" if alone else "seconds"] for line in cost], 1),
                "/".join(sorted({str(line["blocks_out"]) for line in cost})),
                f"{mean(line['latency_ms'] / line['latency_before_ms'] for line in cost):.3f}",
                f"{mean(line['parameters'] / line['parameters_before'] for line in cost):.3f}",
            ]
            label = f"ours: {name}" if is_ours(group, name) else name
            text.append(f"| {label} | " + " | ".join(cells) + " |")
        text += ["", *(versus(group, column, metric) for column in columns), ""]
    return text


def limited(line: Line) -> bool:
    return bool(line["budget"].endswith((" s", " epochs")))


def holds(name: str, value: object, line: Line) -> bool:
    return bool(line[name] == value)


def is_rich(method: str) -> bool:
    """Has something in a removed block's place, or takes out fewer blocks to be as fast as those that do."""
    return "fewer out" in method or method.removesuffix(", healed") in ("rank 8", "full", "half block")


def is_ours(lines: Iterable[Line], name: str) -> bool:
    return any(line["ours"] for line in lines if line["method"] == name)


def leading(lines: Sequence[Line], chosen: Callable[[Line], bool], metric: str, ours: bool | None = None) -> str:
    """The method with the best mean, of all or of one side; '' where there is none."""
    scores: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if chosen(line) and ours in (None, line["ours"]):
            scores[line["method"]].append(line["score"])
    sign = -1 if metric in LOWER else 1
    return max(scores, key=lambda name: sign * mean(scores[name]), default="")


def versus(lines: Sequence[Line], column: Column, metric: str) -> str:
    """The best of ours against the best peer on the same networks and draws."""
    name, chosen = column
    sides = [leading(lines, chosen, metric, ours) for ours in (True, False)]
    if not all(sides):
        return f"- {name}: one side only."
    scores = [
        {
            (line["net_seed"], line["seed"]): line["score"]
            for line in lines
            if chosen(line) and line["method"] == side
        }
        for side in sides
    ]
    sign = -1 if metric in LOWER else 1
    gaps = [sign * (scores[0][key] - scores[1][key]) for key in scores[0] if key in scores[1]]
    if not gaps:
        return f"- {name}: {sides[0]} and {sides[1]} were not measured on the same draws."
    verdict = "ahead of" if mean(gaps) > 0 else "behind"
    wins = sum(gap > 0 for gap in gaps)
    told = f"- {name}: ours ({sides[0]}) {verdict} {sides[1]} by {spread(gaps)}, better in {wins} of {len(gaps)}"
    return f"{told}, p = {sign_flips(gaps):.2g}." if 5 <= len(gaps) <= 16 else f"{told}."


def sign_flips(gaps: Sequence[float]) -> float:
    """The two-sided p value of the mean by all changes of sign."""
    least = abs(sum(gaps)) * (1 - 1e-12)
    flips = product((1, -1), repeat=len(gaps))
    return mean(abs(sum(s * g for s, g in zip(signs, gaps, strict=True))) >= least for signs in flips)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, standard deviation and the number of values; '' for none."""
    if not values:
        return ""
    text = f"{mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {stdev(values):.{digits}f} ({len(values)})"


if __name__ == "__main__":
    main()
