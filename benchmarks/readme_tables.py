"""Write the measured tables of the README and the documentation from the files in benchmarks/results.

    python benchmarks/readme_tables.py          # rewrites README.md, pages of docs/ and the claims of recipes
    python benchmarks/readme_tables.py --check  # says whether they are up to date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, what a recipe expects after `Expected:`. Nobody
types their numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from replearn.experiments import recipes
from replearn.experiments.bench.cases import E2E, REMOVAL, REPL
from replearn.experiments.report import claims
from replearn.experiments.report.benchmarks import measured_in
from replearn.experiments.report.collecting import collect
from replearn.experiments.report.sections import sections_of
from replearn.experiments.training.compare import Comparison, compare
from replearn.experiments.training.comparison_table import difference, spread
from replearn.experiments.training.intervals import Difference, paired_difference, std_of
from replearn.experiments.training.packed import read_results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    *("README.md", "docs/compress.md", "docs/deployment.md", "docs/does-it-hold.md"),
    *("docs/training.md", "docs/transformers.md"),
)
RECIPES = ROOT / "src" / "replearn" / "experiments" / "recipes"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# of a row that two of them have, the later file counts
STEPS = ("steps_h200.json", "steps_h200_bf16.json", "steps_h200_captured.json")


def steps() -> str:
    """Time and memory of a training step; captured ResNets with every candidate built three times."""
    found = {}
    for file in STEPS:
        for entry in read(file)["training"]:
            found[entry["case"]["model"], entry["backend"]] = entry
    return steps_table(found.values())


def steps_table(entries: Iterable[Any]) -> str:
    """A line a backbone and backend."""

    def share(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.3f}"

    lines = [
        "| backbone, placement | backend | removal: time | RepL: time | yield | synthesis | frozen "
        "| removal: memory | RepL: memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        rows = {row["label"]: row for row in entry["rows"]}
        if not {E2E, REMOVAL, REPL} <= rows.keys():
            continue
        gone, ours = rows[REMOVAL], rows[REPL]
        case = entry["case"]
        name = f"{case['model']}, first={case['first'] or case['interval']}"
        cells = [
            name + (f", {case['operator']['name']}" if case["operator"] else ""),
            entry["backend"],
            f"{gone['time']['median']:.3f}",
            f"{ours['time']['median']:.3f}",
            "" if entry["yield_"] is None else f"{entry['yield_']:.2f}",
            *(
                "" if (cost := entry.get(key)) is None else f"{cost['median']:.3f}"
                for key in ("synthesis", "frozen")
            ),
            share(gone["memory_ratio"]),
            share(ours["memory_ratio"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def captured() -> str:
    """Time and memory of a training step that is captured as a CUDA graph."""
    lines = ["| backbone | removal: time | RepL: time | removal: memory | RepL: memory |", "|---|---|---|---|---|"]
    for line in steps().splitlines()[2:]:
        name, backend, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if backend == "captured":
            lines.append("| " + " | ".join([name, cells[0], cells[1], cells[5], cells[6]]) + " |")
    return "\n".join(lines)


PUBLISHED = ("compress_published_resnet56_healed_cpu.jsonl", "compress_published_resnet56_deep_cpu.jsonl")
OWN = ", own choice"
Draws = dict[int, Any]  # lines by the seed of the draw


def published_lines(kind: str) -> list[Any]:
    files = [(RESULTS / name).read_text(encoding="utf-8").splitlines() for name in PUBLISHED]
    return [line for line in map(json.loads, chain(*files)) if line["kind"] == kind]


def published() -> list[tuple[str, Draws]]:
    """What is measured on the published ResNet-56, with its draws, from the worst to the best."""
    found: dict[tuple[str, str, int], Draws] = {}
    for line in published_lines("method"):
        found.setdefault((line["method"], line["budget"], line["blocks_out"]), {})[line["seed"]] = line
    return sorted(((name, draws) for (name, *_), draws in found.items()), key=lambda item: mean_of(item[1]))


def mean_of(draws: Draws) -> float:
    return mean_score(list(draws.values()))


def share_of(cost: str, unit: str, draws: Draws) -> float:
    """What is left of a cost."""
    return statistics.mean(draw[f"{cost}{unit}"] / draw[f"{cost}_before{unit}"] for draw in draws.values())


def cells_of(name: str, draws: Draws) -> list[str]:
    """Method, blocks, training and accuracy."""
    one, name = next(iter(draws.values())), name.removesuffix(", healed")
    chosen = "its own" if name.endswith(OWN) else "every second" if one["blocks_out"] == 12 else "every fourth"
    label = ("replearn: " if one["ours"] else "") + name.removesuffix(OWN).removesuffix(", fewer out")
    score = spread(mean_of(draws), std_of([draw["score"] for draw in draws.values()]))
    return [label, f"{one['blocks_out']}, {chosen}", one["budget"].replace("none", "no"), score]


def nearest_practise(draws: Draws) -> Draws:
    """The PRACTISE that is nearest in latency."""
    peers = [found for name, found in published() if name.startswith("PRACTISE")]
    return min(peers, key=lambda found: abs(share_of("latency", "_ms", found) - share_of("latency", "_ms", draws)))


def compressed() -> str:
    """The published ResNet-56 without 12 blocks, and trained on from compress's own choice beside PRACTISE."""
    score = published_lines("trained")[0]["score"]
    heads = ("blocks out", "training", "accuracy", "latency", "parameters")
    lines = [f"| published ResNet-56 (trained: {score:.2f}) | {' | '.join(heads)} |", "|---|---|---|---|---|---|"]
    found = published()
    beside = [nearest_practise(draws) for name, draws in found if name.endswith(f"{OWN}, healed")]
    for name, draws in found:
        one = next(iter(draws.values()))
        left_out = one["blocks_out"] != 12 or name in ("ReplaceMe", "rank 8")
        if draws in beside or name.endswith(f"{OWN}, healed") or not (one["trains"] or left_out):
            costs = [share_of("latency", "_ms", draws), share_of("parameters", "", draws)]
            lines.append("| " + " | ".join([*cells_of(name, draws), *(f"{cost:.2f}" for cost in costs)]) + " |")
    return "\n".join(lines)


def by_images() -> str:
    """What a published ResNet-56 keeps of 12 blocks out, by the number of images."""
    file = RESULTS / "compress_published_resnet56_images_cpu.jsonl"
    scores: dict[str, dict[int, list[float]]] = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if line["kind"] == "method":
            label = ("replearn: " if line["ours"] else "") + line["method"]
            scores.setdefault(label, {}).setdefault(line["images"], []).append(line["score"])
    counts = sorted({count for found in scores.values() for count in found})
    shown = ["| images | " + " | ".join(f"{count:,}" for count in counts) + " |", "|---" * (len(counts) + 1) + "|"]
    for label, found in sorted(scores.items(), key=lambda item: statistics.mean(item[1][counts[-1]])):
        shown.append(
            "| "
            + " | ".join(
                [
                    label,
                    *(spread(statistics.mean(found[count]), statistics.stdev(found[count])) for count in counts),
                ]
            )
            + " |"
        )
    return "\n".join(shown)


def healed() -> str:
    """The published ResNet-56 after equal seconds of training, beside the PRACTISE of the nearest latency."""
    rows = [(name, draws, next(iter(draws.values()))) for name, draws in published()]
    rows = [row for row in rows if row[2]["ours"] or row[2]["trains"]]
    shown = [
        "| | blocks out | training | accuracy | against PRACTISE, 95 % interval | latency | draws |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, draws, one in rows:
        mine = share_of("latency", "_ms", draws)
        sides = (draws, nearest_practise(draws))
        scores, theirs = ({seed: draw["score"] for seed, draw in side.items()} for side in sides)
        compared = difference(paired_difference(scores, theirs)) if one["ours"] else ""
        shown.append("| " + " | ".join([*cells_of(name, draws), compared, f"{mine:.2f}", str(len(draws))]) + " |")
    return "\n".join(shown)


def compressed_trained() -> str:
    """What networks trained here keep without a training step, as differences to the trained network."""
    columns = {
        ("resnet32-cifar10", 2000): "ResNet-32, CIFAR-10, 6 of 15 out, 2,000 images",
        ("resnet56-cifar100", 2000): "ResNet-56, CIFAR-100, 12 of 27 out, 2,000 images",
        ("resnet56-cifar100", 500): "500 images",
        ("resnet56-cifar100", 100): "100 images",
        ("lm-wikitext2-3-out", 1024): "LM, WikiText-2, 3 of 12 out, 1,024 windows",
        ("lm-wikitext2", 1024): "5 of 12 out",
    }
    gaps: dict[str, dict[tuple[str, int], list[float]]] = {}
    for file in ("resnet32_cifar10", "resnet56_cifar100", "lm_wikitext2_peers", "lm_wikitext2"):
        lines = [json.loads(line) for line in (RESULTS / f"compress_{file}_h200.jsonl").read_text().splitlines()]
        trained = {
            (line["subject"], line["net_seed"]): line["score"] for line in lines if line["kind"] == "trained"
        }
        for line in lines:
            if line["kind"] == "method":
                label = ("replearn: " if line["ours"] else "") + line["method"]
                gap = line["score"] - trained[line["subject"], line["net_seed"]]
                gaps.setdefault(label, {}).setdefault((line["subject"], line["images"]), []).append(gap)
    shown = ["| no training | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, found in sorted(gaps.items(), key=lambda item: (item[0].startswith("replearn"), item[0])):
        cells = [f"{statistics.mean(found[key]):+.2f}" if key in found else "" for key in columns]
        shown.append("| " + " | ".join([label, *cells]) + " |")
    return "\n".join(shown)


def mean_score(draws: list[Any]) -> float:
    return statistics.mean(draw["score"] for draw in draws)


def deployed() -> str:
    """How much faster deployed RepL is than E2E for 64 images."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in inference().splitlines()]
    kept = [place for place, cell in enumerate(rows[0]) if not cell or "batch 64" in cell]
    shown = [row for row in rows if all(row[1:]) and row[0] != "channels_last+graph"]
    return "\n".join("| " + " | ".join(row[place] for place in kept) + " |" for row in shown)


def scratch() -> str:
    return compared("t1_resnet32_cifar10_100_epochs", costs=True)


def wikitext2() -> str:
    return compared("tab_wikitext2", costs=True)


def transfer() -> str:
    return compared("transfer_cifar10", costs=True)


def finetune() -> str:
    """One seed: no intervals; but each run had the GPU to itself, so what it needed counts."""
    lines = ["|  | epochs | accuracy | time | memory | time in all |", "|---" * 6 + "|"]
    lines += tuned("tab_finetune_vit_100_epochs")
    lines += tuned("tab_finetune_vit_79_epochs", of=100)
    lines += tuned("tab_finetune_vit_10_epochs")
    return "\n".join(lines)


def tuned(name: str, of: int = 0) -> list[str]:
    """A row a method; the time of the whole run as a share of E2E's, or of as many of its epochs."""
    (found,) = [each for each in compared_rows(name) if each.recipe == "tab_finetune_vit"]
    rows, lines = found.rows, []
    for row in rows:
        whole = row.time_ratio * row.epochs / (of or rows[0].epochs)
        cells = [row.label, str(row.epochs), f"{row.score:.2f}", f"{row.time_ratio:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{row.memory_ratio:.3f}", f"{whole:.2f}"]) + " |")
    return lines


def compared_rows(name: str) -> list[Comparison]:
    return compare(read_results(RESULTS / f"{name}.jsonl"))


def compared(name: str, costs: bool) -> str:
    """Scores over seeds and paired differences of the runs in a file, as `replearn compare --from` has them."""
    (found,) = compared_rows(name)
    head = ["", found.metric.name, "against E2E, 95 % interval", "against removal"]
    head += ["time"] if costs else []
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in found.rows:
        cells = [row.label, spread(row.score, row.std), said(row.against_e2e), said(row.against_removal)]
        if costs:
            cells.append(f"{row.time_ratio:.3f}" if row.time_ratio else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def said(difference: Difference | None) -> str:
    if difference is None or difference.low is None or difference.high is None:
        return ""
    return f"{difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}] {difference.verdict}"


BACKENDS = (
    *("fp32", "channels_last", "amp", "channels_last+compile"),
    *("graph", "channels_last+graph", "amp+graph", "channels_last+compile+graph"),
)


def inference() -> str:
    """How much faster deployed RepL is than E2E, both in their fastest form, at every batch size."""
    rows = {(row["model"], row["backend"], row["batch"]): row for row in read("inference_h200.json")["rows"]}
    columns = [(model, batch) for model in ("resnet34", "vit_small_16") for batch in (1, 32, 64)]
    names = {"resnet34": "ResNet-34", "vit_small_16": "ViT-S/16"}
    head = ["", *(f"{names[model]}, batch {batch}" for model, batch in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for backend in BACKENDS:
        found = [rows.get((model, backend, batch)) for model, batch in columns]
        ratios = [row["speedup"]["RepL deployed against E2E"]["median"] if row else None for row in found]
        lines.append("| " + " | ".join([backend, *(f"{ratio:.2f}" if ratio else "" for ratio in ratios)]) + " |")
    return "\n".join(lines)


def fused() -> str:
    """Milliseconds of E2E and deployed RepL, and their ratio, with convolutions and their ReLUs at once or not."""
    rows = {(row["model"], row["batch"], row["backend"]): row for row in read("inference_h200_fused.json")["rows"]}
    names = {"resnet34": "ResNet-34", "resnet101": "ResNet-101"}
    images = {1: "one image", 64: "64 images"}
    columns = [(model, batch) for model in names for batch in images]
    head = ["", *(f"{names[model]}, {images[batch]}" for model, batch in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for backend in dict.fromkeys(backend for _, _, backend in rows):
        cells = [backend]
        for model, batch in columns:
            row = rows.get((model, batch, backend))
            took = [row["milliseconds"][side]["median"] for side in ("E2E", "RepL deployed")] if row else ()
            ratio = f" ({row['speedup']['RepL deployed against E2E']['median']:.2f})" if row else ""
            cells.append(" / ".join(f"{each:.2f}" for each in took) + ratio)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(value: Difference | None) -> str:
    """The verdict above its difference and interval."""
    if value is None:
        return ""
    word = value.verdict if value.verdict == "undecided" else f"**{value.verdict}**"
    return f"{word}<br>{difference(value).removesuffix(f' {value.verdict}')}"


def p_of(value: Difference | None) -> str:
    return "" if value is None or value.corrected is None else f"{value.corrected:.3f}"


def holds() -> str:
    """The paper's claims beside ours, from every file of results: answers first, what they come from folded."""
    found, parts = collect(RESULTS), []
    for table in claims.tables(sections_of(found), measured_in(found.others)[0]):
        shown = [[verdict(cell) if not isinstance(cell, str) else cell for cell in row] for row in table.rows]
        lines, more = markdown(table.heads, shown), []
        if table.title == claims.PAPER:  # few columns; the others are folded
            lines = markdown(table.heads[:5], [row[:5] for row in shown])
            decided = [[p_of(cell) for cell in row[1:3] if not isinstance(cell, str)] for row in table.rows]
            rest = [[row[0], *p, *row[5:]] for row, p in zip(shown, decided, strict=True)]
            more = markdown(["row", "p, E2E", "p, removal", *table.heads[5:]], rest)
        elif table.title != claims.SHORT:
            lines, more = [], lines
        if table.commands:
            more += ["", "Trained by", "", *(f"- `{text}`" for text in table.commands)]
        if more:
            held = " and ".join(
                ["Scores" if lines else f"All {len(shown)} rows", *["commands"] * bool(table.commands)]
            )
            more = ["", '<details markdown="1">', f"<summary>{held}</summary>", "", *more, "", "</details>"]
        parts.append("\n".join([f"## {table.title}", "", textwrap.fill(table.about, 119), "", *lines, *more]))
    return "\n\n".join(parts)


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def expected(name: str) -> str:
    """What a recipe expects, from the file that backs it: scores, and what is decided."""
    (found,) = compare(read_results(ROOT / recipes.claim(name)["Backed by"]))
    scores = ", ".join(f"{row.label} {spread(row.score, row.std)}" for row in found.rows)
    decided = [
        f"{row.label} is {difference.verdict} than {base}"
        for row in found.rows
        for base, difference in (("E2E", row.against_e2e), ("removal", row.against_removal))
        if difference and difference.verdict != "undecided"
    ]
    rest = "the other differences are undecided" if decided else "all differences are undecided"
    return f"{scores}; {', '.join([*decided, rest])}"


def with_claims(text: str) -> str:
    """A file of recipes with every backed claim made anew."""

    def made(match: re.Match[str]) -> str:
        words = f"Expected: {expected(match[2])}"
        return match[1] + textwrap.fill(words, 115, subsequent_indent="    ") + "\n"

    pattern = r"(^## (\w+): (?:(?!^## ).)*?^)Expected:(?:(?!^\S).)*?\n(?=\S)"
    return re.sub(pattern, made, text, flags=re.DOTALL | re.MULTILINE)


TABLES: dict[str, Callable[[], str]] = {
    "by_images": by_images,
    "captured": captured,
    "compressed": compressed,
    "compressed_trained": compressed_trained,
    "deployed": deployed,
    "finetune": finetune,
    "healed": healed,
    "fused": fused,
    "holds": holds,
    "inference": inference,
    "scratch": scratch,
    "steps": steps,
    "transfer": transfer,
    "wikitext2": wikitext2,
}


def with_tables(text: str) -> str:
    """A page with every marked table made anew."""

    def made(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{TABLES[match[2]]()}\n\n{match[4]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n(.*?)(<!-- end -->)", made, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path in (*(ROOT / page for page in PAGES), *sorted(RECIPES.glob("[a-z]*.py"))):
        before = path.read_text(encoding="utf-8")
        after = with_claims(before) if path.suffix == ".py" else with_tables(before)
        if check and before != after:
            sys.exit(f"{path.relative_to(ROOT)} is not up to date: python benchmarks/readme_tables.py")
        if not check:
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
