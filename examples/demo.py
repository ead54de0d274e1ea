"""What to use when, on real digits: `make demo`, about two minutes on a CPU; nothing is downloaded.

Trains a small ResNet end to end, and with 3 of its 12 blocks removed or replaced by RepL from the start.
Then takes 3 and 6 blocks out of each trained network. Every model is deployed, tested and timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import replearn
from replearn.cli.progress import watching
from replearn.cli.runs import spec_of
from replearn.experiments import recipes
from replearn.experiments.report.page import build_report
from replearn.experiments.training.compare import compare
from replearn.experiments.training.fit import fit
from replearn.experiments.training.trained import read_full_model, read_trained
from replearn.fast.inference import streamline

FORMS: dict[str, dict[str, Any]] = {
    "compress: bare removal": {"form": "removal", "realign": False},
    "compress: realigned removal": {"form": "removal"},
    "compress: fitted": {},
}
COLORS = {"end to end": "#444", "removal, from scratch": "#b07d2b", "RepL, from scratch": "#7a4fa3"}
COLORS |= dict(zip(FORMS, ("#c0392b", "#1f77b4", "#2a7f3f"), strict=True))


@dataclass
class Row:
    """A way to a smaller network, with a number for each seed."""

    way: str
    out: int
    accuracy: list[float] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)  # a share of the end-to-end network's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()

    recipe = recipes.recipe("demo")
    recipe = recipe if given.epochs is None else replace(recipe, epochs=given.epochs)
    seeds = range(given.seeds)
    specs = [spec_of(recipe, row, "digits", seed, given.out, None) for seed in seeds for row in recipe.variants]
    with watching(len(specs), recipe.epochs) as progress:
        results = [fit([spec], device="cpu", resume=True, progress=progress)[0] for spec in specs]

    rows = {way: Row(way, 3 if "scratch" in way else 0) for way in list(COLORS)[:3]}
    rows |= {f"{way} {out}": Row(way, out) for out in (3, 6) for way in FORMS}
    for seed in seeds:
        measure(rows, given.out / "digits", seed)
    print(table(list(rows.values())))
    print(f"\n{advice(rows)}")

    replaced = next(row for row in compare(results)[0].rows if row.method == "repl")
    if replaced.against_removal is not None:
        print(f"From scratch, RepL against removal: {replaced.against_removal.verdict} (paired, 95 %).")
    picture = given.out / "demo.png"
    draw(list(rows.values()), picture)
    page = build_report(given.out, given.out / "report.html", title="Digits").page
    print(f"\nThe picture is {picture}, the report of the training runs is {page}.")
    print(f"{time.perf_counter() - begin:.0f} s, {given.seeds} seeds, one CPU thread.")


def measure(rows: dict[str, Row], runs: Path, seed: int) -> None:
    """Deploy every network of a seed, test it, and time all of them in turns."""
    full = read_full_model(runs / "e2e" / f"seed-{seed}", torch.device("cpu"), None)
    data = [images for images, _ in full.train_batches(500, 100, seed)]  # without their labels
    example = data[0]
    plain = {"end to end": full.model}  # ordinary modules, as plan and compress count them
    for method, way in (("removal", "removal, from scratch"), ("repl", "RepL, from scratch")):
        trained = read_trained(runs / method / f"seed-{seed}").model.eval()
        plain[way] = replearn.deploy(trained, example=example, fold="operators")
    for name, row in rows.items():
        if row.way in FORMS:
            small = replearn.compress(full.model, data, budget=f"blocks={row.out}", **FORMS[row.way])
            plain[name] = small.model
    made = {name: streamline(model, example) for name, model in plain.items()}
    shares = latencies(made, example)
    for name, model in made.items():
        rows[name].accuracy.append(full.score(model))
        rows[name].parameters.append(sum(parameter.numel() for parameter in plain[name].parameters()))
        rows[name].latency.append(shares[name])


@torch.inference_mode()
def latencies(models: dict[str, nn.Module], images: Tensor, rounds: int = 40) -> dict[str, float]:
    """Each model's time as a share of the first one's, in turns.

    It is the thread's own CPU time: other work on the machine hardly changes it.
    """
    seconds = dict.fromkeys(models, 0.0)
    for _ in range(rounds):
        for name, model in models.items():
            begin = time.thread_time()
            model(images)
            seconds[name] += time.thread_time() - begin
    first = next(iter(seconds.values()))
    return {name: spent / first for name, spent in seconds.items()}


def table(rows: list[Row]) -> str:
    lines = [f"{'':28}{'blocks out':>12}{'accuracy':>16}{'parameters':>12}{'latency':>9}"]
    for row in rows:
        spread = statistics.stdev(row.accuracy) if len(row.accuracy) > 1 else 0.0
        accuracy = f"{statistics.mean(row.accuracy):.2f} ± {spread:.2f}"
        lines.append(
            f"{row.way:28}{f'{row.out} of 12':>12}{accuracy:>16}{statistics.mean(row.parameters):>12,.0f}"
            f"{statistics.mean(row.latency):>9.2f}"
        )
    return "\n".join(
        [
            *lines,
            "",
            "compress trains nothing and looks at 500 images without labels.",
            "parameters: of ordinary modules, before their BatchNorms are folded; latency is that of folded ones.",
            "latency: CPU time of the deployed model for 100 images on one thread, as a share of end to end.",
        ]
    )


def advice(rows: dict[str, Row]) -> str:
    """What the table says about taking blocks out of a trained network."""
    bare, *others = (rows[f"{way} 6"] for way in FORMS)
    best = max(others, key=lambda row: statistics.mean(row.accuracy))
    start, plain, kept = (statistics.mean(row.accuracy) for row in (rows["end to end"], bare, best))
    return (
        f"Without 6 of its 12 blocks, the network trained to {start:.2f} % has {kept:.2f} % by {best.way}, "
        f"and {plain:.2f} % by bare removal."
    )


def draw(rows: list[Row], file: Path) -> None:
    """Accuracy against latency: up and to the left is better."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), dpi=150, layout="constrained")
    axes: Any = figure.subplots()
    start = rows[0]
    for way, color in COLORS.items():
        own = [row for row in rows if row.way == way]
        points = [start, *own] if way in FORMS else own
        x = [statistics.mean(row.latency) for row in points]
        y = [statistics.mean(row.accuracy) for row in points]
        axes.plot(x, y, "o-" if way in FORMS else "D", color=color, label=way, markersize=7)
        if way in FORMS:
            for row in own:
                place = (statistics.mean(row.latency), statistics.mean(row.accuracy))
                above = way == "compress: fitted"
                offset = (0, 8 if above else -14)
                axes.annotate(f"{row.out} out", place, offset, textcoords="offset points", fontsize=9, color=color)
    axes.set(xlabel="latency, share of the end-to-end network", ylabel="test accuracy, %")
    axes.set_title("Digits: blocks taken out of a trained network, or left out from the start", fontsize=11)
    axes.margins(0.07)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(file)


if __name__ == "__main__":
    main()
