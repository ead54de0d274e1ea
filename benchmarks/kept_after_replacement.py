"""How much accuracy a trained model keeps when its blocks are replaced afterwards, without training.

    python benchmarks/kept_after_replacement.py --recipe t1_resnet32 --epochs 40 --out kept_t1_resnet32.json
    python benchmarks/kept_after_replacement.py --run runs/t1_resnet32/cifar10/e2e/seed-0 --out kept.json

Takes an end-to-end run of `replearn train`, or trains the recipe first (or `--model` with the recipe's settings;
the run's folder is `--runs`, so that a second call finds it). Blocks are replaced by operators fitted in closed
form on calibration images of the training set. Accuracy is on the test set, and nothing is chosen there: ridges
and ways of fitting come from held-out calibration batches. Three curves and a table, next to removal and to the
paper's span, as JSON and a picture beside it:

- rank: the correction's rank, from none (the paper's span) to full, at every placement
- interval: K = 2, 3, 4, ..., at full correction, the paper's span and removal
- images: the number of calibration images, at the densest placement
- operators: every operator that suits the blocks
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import replearn
from replearn import operators, recipes
from replearn.training.fit import device_named, fit
from replearn.training.results import hardware_of, versions_of, write_atomically
from replearn.training.run import RunSpec
from replearn.training.trained import Trained, read_trained

PLACEMENTS = ((4, 4), (4, 2), (2, 2))
BATCH = 250


@dataclass(frozen=True)
class Forms:
    """The operators to compare on one kind of block, from nothing to a full correction."""

    span: operators.Options
    full: operators.Options
    ranked: Any  # of a rank, or None
    others: tuple[operators.Options, ...]


def forms(kind: str) -> Forms:
    main = {
        "basic": operators.Basic,
        "bottleneck": operators.ReducedBottleneck,
        "transformer": operators.Projection,
    }
    other = {
        "basic": (operators.NoWeights(), operators.WholeBlock()),
        "bottleneck": (
            operators.NoWeights(),
            operators.Bottleneck(),
            operators.Bottleneck(correction="low-rank", rank=8),
            operators.Bottleneck(correction="full"),
        ),
        "transformer": (
            operators.NoWeights(),
            operators.HeadWise(),
            operators.HeadWise(correction="full"),
            operators.MLP(),
            operators.MLP(correction="full"),
            operators.AttentionMLP(correction="full", attention="head_wise"),
            operators.WholeBlock(),
        ),
    }
    form = main[kind]
    return Forms(
        form(), form(correction="full"), lambda rank: form(correction="low-rank", rank=rank), tuple(other[kind])
    )


def trained(options: argparse.Namespace, device: torch.device) -> Trained:
    """The run that was named, or the recipe after training end to end."""
    if options.run is not None:
        return read_trained(options.run, device, options.data_root, full=True)
    recipe = replace(recipes.recipe(options.recipe), epochs=options.epochs)
    if device.type == "cpu":
        recipe = replace(recipe, precision="float32")
    else:  # the fast form: in bfloat16 without channels_last a CIFAR ResNet takes four times as long
        recipe = replace(recipe, precision="bfloat16", channels_last=True)
    if options.model:
        recipe = replace(recipe, model=options.model)
    if options.batch_size:
        recipe = replace(recipe, batch_size=options.batch_size)
    slug = f"{recipe.model.replace(':', '-')}-{options.data}-{recipe.epochs}-epochs-seed-{options.seed}"
    out = options.runs / slug
    variant = recipe.variant("E2E")
    spec = RunSpec(
        recipe=recipe, variant=variant, data=options.data, seed=options.seed, out=out, data_root=options.data_root
    )
    fit([spec], device=options.device, resume=(out / "checkpoint.safetensors").exists())
    return read_trained(out, device, options.data_root, full=True)


class Measuring:
    """Replaces, fits and tests copies of one model; every row is measured once, however many curves show it."""

    def __init__(self, base: Trained, seed: int) -> None:
        self.base, self.seed = base, seed
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.batches: dict[int, list[torch.Tensor]] = {}

    def measure(self, interval: int, first: int, operator: operators.Options, count: int) -> dict[str, Any] | None:
        """One row, or None where the placement or the rank does not fit this model."""
        key = (interval, first, operator, count)
        if key in self.rows:
            return self.rows[key]
        model = copy.deepcopy(self.base.model)
        try:
            plan = replearn.plan(model, interval, first, operator=operator)
        except replearn.ReplearnError as error:
            reason = str(error).split(": ")[0]
            print(f"left out: K={interval} first={first} {operator.label()}: {reason}", flush=True)
            return None
        if count not in self.batches:
            drawn = self.base.train_batches(count, min(BATCH, max(1, count // 4)), self.seed)
            self.batches[count] = [images for images, _ in drawn]
        begin = time.perf_counter()
        report = replearn.calibrate_(model, plan, self.batches[count])
        kept, seconds = self.base.accuracy(model.eval()), time.perf_counter() - begin
        row = {
            "interval": interval,
            "first": first,
            "targets": len(plan.targets),
            "operator": operator.label(),
            "rank": getattr(operator, "rank", None) if getattr(operator, "correction", "") == "low-rank" else None,
            "calibration_images": count,
            "accuracy": kept,
            "deployed_accuracy": self.base.accuracy(replearn.deploy(model)),
            "unexplained": [fit.error for fit in report.fits],
            "removal_unexplained": [fit.removal_error for fit in report.fits],
            "parameters": plan.parameters_after,
            "parameters_before": plan.parameters_before,
            "seconds": round(seconds, 2),
        }
        errors = ", ".join(f"{fit.error:.2f}" for fit in report.fits[:8])
        place = f"K={interval} first={first} images={count}"
        print(f"{place:28s} {operator.label():40s} {kept:6.2f}  ({errors})", flush=True)
        self.rows[key] = row
        return row

    def curve(self, cases: list[tuple[int, int, operators.Options, int]]) -> list[dict[str, Any]]:
        return [row for case in cases if (row := self.measure(*case)) is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of an end-to-end run, instead of training one")
    parser.add_argument("--recipe", default="t1_resnet32")
    parser.add_argument("--model", help="another model with the recipe's settings, as torchvision:resnet50")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/kept"))
    parser.add_argument("--images", type=int, default=2000, help="for the curves over ranks and intervals")
    parser.add_argument("--image-counts", type=int, nargs="*", default=[50, 100, 200, 500, 1000, 2000, 5000])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--intervals", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--no-operators", action="store_true", help="leave the table of all operators out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = device_named(options.device)
    torch.manual_seed(options.seed)
    base = trained(options, device)
    torch.set_float32_matmul_precision("highest")
    full = base.accuracy(base.model)
    print(f"{base.name}: {full:.2f} %", flush=True)
    measuring, begin = Measuring(base, options.seed), time.perf_counter()
    form = forms(replearn.find_stacks(base.model)[0].anatomies[0].kind)
    floor, images = operators.Removal(), options.images
    ranked = [form.span, *(form.ranked(rank) for rank in options.ranks), form.full]
    curves = {
        "rank": [(k, first, operator, images) for k, first in PLACEMENTS for operator in (floor, *ranked)],
        "interval": [
            (k, 2, operator, images) for k in options.intervals for operator in (floor, form.span, form.full)
        ],
        "images": [
            (2, 2, operator, count)
            for count in options.image_counts
            for operator in (floor, form.span, form.ranked(8), form.full)
        ],
        "operators": [
            (k, first, operator, images)
            for k, first in PLACEMENTS
            for operator in (floor, form.span, form.full, *form.others)
            if not options.no_operators
        ],
    }
    made = {name: measuring.curve(cases) for name, cases in curves.items()}
    about = {
        "format": "replearn-kept-1",
        "script": "benchmarks/kept_after_replacement.py",
        "arguments": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
        "model": base.name,
        "trained_accuracy": full,
        "rows": list(measuring.rows.values()),
        "curves": made,
        "seconds": round(time.perf_counter() - begin, 1),
        "hardware": hardware_of(device),
        "versions": versions_of(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(about, indent=1))
    draw(about, options.out.with_suffix(".png"))
    print(f"{options.out}, measured in {about['seconds']} s")


def draw(about: dict[str, Any], path: Path) -> None:
    """Accuracy kept against rank, interval and calibration images, with removal and the full model beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.9), dpi=150, layout="constrained")
    by_rank, by_interval, by_images = figure.subplots(1, 3, sharey=True)
    colours = ("#1f5fa8", "#c2570c", "#15803d")
    ranked = about["curves"]["rank"]
    ranks = sorted({row["rank"] for row in ranked if row["rank"]})
    ticks = ["span", *map(str, ranks), "full"]
    for (interval, first), tint in zip(PLACEMENTS, colours, strict=True):
        rows = [row for row in ranked if (row["interval"], row["first"]) == (interval, first)]
        whole = max((row["targets"] for row in rows), default=0)
        # a rank that is too large for some blocks leaves them in place, which is not the same feat
        kept = [row for row in rows if row["operator"] != "removal" and row["targets"] == whole]
        places = [ticks.index(str(row["rank"])) if row["rank"] else len(ticks) - 1 for row in kept]
        places[:1] = [0] if kept else []
        label = f"K={interval}, first={first}" if kept else None
        by_rank.plot(places, [row["accuracy"] for row in kept], "o-", color=tint, label=label, ms=4)
        for row in rows:
            if row["operator"] == "removal":
                by_rank.axhline(row["accuracy"], color=tint, lw=0.8, ls="--")
    by_rank.set_xticks(range(len(ticks)), ticks)
    by_rank.set_xlabel("rank of the correction (dashed: removal)")
    by_rank.set_ylabel("test accuracy kept, %")
    for axes, name, value in ((by_interval, "interval", "interval"), (by_images, "images", "calibration_images")):
        rows = about["curves"][name]
        labels = list(dict.fromkeys(row["operator"] for row in rows))
        for label, tint in zip(labels, ("#6b7280", *colours), strict=False):
            points = [(row[value], row["accuracy"]) for row in rows if row["operator"] == label]
            axes.plot(*zip(*points, strict=True), "o-", color=tint, label=label, ms=4)
    by_interval.set_xticks(sorted({row["interval"] for row in about["curves"]["interval"]}))
    by_interval.set_xlabel("interval K (first=2)")
    by_images.set_xscale("log")
    counts = sorted({row["calibration_images"] for row in about["curves"]["images"]})
    by_images.set_xticks(counts, [str(count) for count in counts])
    by_images.set_xticks([], minor=True)
    by_images.set_xlabel("calibration images (K=2, first=2)")
    for axes in (by_rank, by_interval, by_images):
        axes.axhline(about["trained_accuracy"], color="#6b7280", lw=0.9, ls=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7.5, frameon=False)
        axes.tick_params(labelsize=8)
    figure.suptitle(
        f"{about['model']}: blocks replaced afterwards, no training (dotted: the full model)", fontsize=10
    )
    figure.savefig(path)


if __name__ == "__main__":
    main()
