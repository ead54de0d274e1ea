"""How much accuracy a trained model keeps when its blocks are replaced afterwards, without training.

    python benchmarks/kept_after_replacement.py --recipe t1_resnet32 --epochs 40 --out kept_t1_resnet32.json
    python benchmarks/kept_after_replacement.py --run runs/t1_resnet32/cifar10/e2e/seed-0 --out kept.json
    python benchmarks/kept_after_replacement.py --recipe tab_wikitext2 --data wikitext2 --out kept_lm.json

Takes an end-to-end run of `replearn train`, or trains the recipe first (or `--model` with the recipe's settings;
the run's folder is `--runs`, so that a second call finds it). Blocks are replaced by operators fitted in closed
form on calibration samples of the training set (images, or windows of a text). Accuracy or perplexity is on the
test set, and nothing is chosen there: ridges and ways of fitting come from held-out calibration batches. Three
curves and a table, next to removal and to the paper's span, as JSON:

- rank: the correction's rank, from none (the paper's span) to full, at every placement
- interval: K = 2, 3, 4, ..., at full correction, the paper's span and removal
- images: the number of calibration samples, at the densest placement
- operators: every operator that suits the blocks
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kept_subjects import trained

import replearn
from replearn import operators
from replearn.experiments.training.fit import device_named
from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.experiments.training.trained import Trained

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
        report = replearn.calibrate_(model, plan, self.batches[count], correction="none")
        kept, seconds = self.base.score(model.eval()), time.perf_counter() - begin
        metric = self.base.metric
        row = {
            "interval": interval,
            "first": first,
            "targets": len(plan.targets),
            "operator": operator.label(),
            "rank": getattr(operator, "rank", None) if getattr(operator, "correction", "") == "low-rank" else None,
            f"calibration_{self.base.samples}": count,
            metric: kept,
            f"deployed_{metric}": self.base.score(replearn.deploy(model)),
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
    parser.add_argument("--rate", type=float, help="the peak learning rate, instead of the recipe's")
    parser.add_argument("--length", type=int, help="words in a window of a text, instead of the recipe's")
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
    full = base.score(base.model)
    print(f"{base.name}: {base.metric} {full:.2f}", flush=True)
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
        "model": f"{options.model}: {base.name}" if options.model else base.name,
        "metric": base.metric,
        "samples": base.samples,
        f"trained_{base.metric}": full,
        "rows": list(measuring.rows.values()),
        "curves": made,
        "seconds": round(time.perf_counter() - begin, 1),
        "hardware": hardware_of(device),
        "versions": versions_of(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(about, indent=1))
    print(f"{options.out}, measured in {about['seconds']} s")


if __name__ == "__main__":
    main()
