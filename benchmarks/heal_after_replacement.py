"""How much a trained transformer keeps when its blocks are taken out afterwards, and how fast it heals.

    python benchmarks/heal_after_replacement.py --model lm --data-root DATA --out heal_lm.json
    python benchmarks/heal_after_replacement.py --model vit --data-root DATA --out heal_vit.json
    python benchmarks/heal_after_replacement.py --run runs/tab_wikitext2/wikitext2/e2e/seed-0 --out heal_lm.json

Trains the base model end to end (WikiText-2: a language model, perplexity; CIFAR-10: a ViT, accuracy), or takes
a finished run, then takes out a quarter and nearly half of its blocks (interval 4 and 2, first=2: 3 and 5 of 12,
which is as many as can go where the first, the last and every neighbour stay), each in several ways, and trains
what is left for one epoch at a tenth of the rate. Below the rows of a placement stands E2E continued for as many
seconds as the slowest of them (but the whole block) took, fitting included: what the untouched model does with
that time. Operators are fitted on training samples, and nothing is chosen on the test set. The file is written
after each row.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import replearn
from replearn import operators
from replearn.experiments import recipes
from replearn.experiments.training.fit import device_named, synchronize
from replearn.experiments.training.optimizers import make_optimizer, rate_at, set_rate
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.recipe import Recipe, Schedule, Variant
from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.experiments.training.run import Run, RunSpec
from replearn.experiments.training.tasks import Task, task_named
from replearn.experiments.training.trained import read_trained
from replearn.operators._base.options import Options
from replearn.planning.table import text_table

RECIPES = {"lm": ("tab_wikitext2", 6), "vit": ("t1_vit_tiny8", 40)}  # the recipe, and epochs for the base model
PLACEMENTS = ((4, 2), (2, 2))  # a quarter of the blocks, and as many as can go: 5 of 12
HEALING = 0.1  # the peak rate of healing, as a share of the recipe's


def candidates(rank: int) -> list[tuple[str, Options]]:
    return [
        ("(a) removal", operators.Removal()),
        ("(b) projection, fitted coefficients", operators.Projection()),
        ("(c) fitted low-rank correction", operators.Projection(correction="low-rank", rank=rank)),
        ("(d) fitted full correction", operators.Projection(correction="full")),
        ("(d) fitted full correction, behind a norm", operators.HeadWise(correction="full")),
        ("(d) fitted full correction, MLP form", operators.MLP(correction="full")),
    ]


WHOLE = ("(e) whole block", operators.WholeBlock())


class Bench:
    """The base model, its task, and the two things done with models: measuring them and training them on."""

    def __init__(self, recipe: Recipe, data: str, root: Path | None, seed: int, device: torch.device) -> None:
        self.recipe, self.seed, self.device = recipe, seed, device
        variant = Variant(label="E2E", method="e2e")
        spec = RunSpec(recipe=recipe, variant=variant, data=data, seed=seed, out=Path(mkdtemp()), data_root=root)
        self.task: Task = task_named(recipe.task).open(spec, device, Processes(), {})
        self.run = Run(spec, self.task, device, Processes())
        self.metric = self.task.metric

    def train_base(self) -> tuple[torch.nn.Module, float]:
        begin = self.now()
        while not self.run.finished:
            self.run.start_epoch()
            for _ in range(self.run.steps_per_epoch):
                self.run.step()
            measured = self.run.end_epoch(0.0)
            print(
                f"epoch {measured.epoch}: {self.metric.name} {measured.measures[self.metric.key]:.2f}", flush=True
            )
        return self.run.bare, self.now() - begin

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    @torch.no_grad()
    def score(self, model: torch.nn.Module) -> float:
        model.eval()
        return self.task.evaluate(model, self.autocast())[self.metric.key]

    def autocast(self) -> torch.autocast:
        return self.run.autocast()

    def heal_(self, model: torch.nn.Module, steps: int | None, seconds: float | None) -> tuple[int, float]:
        """Train for a number of steps or seconds, the rate falling to zero; steps taken and seconds spent."""
        model.train()
        batches, recipe = self.task.batches, self.recipe
        optimizer = make_optimizer(model, recipe.optimizer, self.device)
        schedule = Schedule(name="cosine", warmup_epochs=0.02)
        per_epoch = batches.steps
        begin, taken, epoch, spent = self.now(), 0, recipe.epochs, 0.0
        while True:
            if seconds is not None and taken % 8 == 0:  # looking at the clock waits for the device
                spent = self.now() - begin
            if (steps is not None and taken >= steps) or (seconds is not None and spent >= seconds):
                return taken, self.now() - begin
            if taken % per_epoch == 0:
                batches.start_epoch(self.seed, epoch, 0)
                epoch += 1
            # by steps or by the clock, the schedule runs from its beginning to its end
            done = taken if seconds is None else round(spent / seconds * per_epoch)
            rate = rate_at(schedule, done, steps or per_epoch, per_epoch)
            set_rate(optimizer, HEALING * recipe.optimizer.lr * rate)
            torch.manual_seed(self.seed + taken)
            batches.advance(taken % per_epoch)
            optimizer.zero_grad(set_to_none=True)
            with self.autocast():
                loss, _ = self.task.loss(model, batches.current())
            loss.backward()
            if recipe.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
            taken += 1


def measured(
    bench: Bench,
    base: torch.nn.Module,
    samples: int,
    steps: int | None,
    rank: int,
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Every candidate at every placement, and E2E continued for as long as the slowest of them took."""
    batches = bench.task.batches.calibration(bench.seed, samples)
    epoch = bench.task.batches.steps if steps is None else steps
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> dict[str, Any]:
        rows.append(row)
        keep(rows)
        print(f"K={row['interval']} {row['label']}: healed {row['healed']:.2f}", flush=True)
        return row

    for interval, first in PLACEMENTS:
        placed = {"interval": interval, "first": first}
        spent = []
        for label, operator in candidates(rank):
            row = add(placed | {"label": label} | healed(bench, base, operator, placed, batches, epoch))
            spent.append(row["fit_seconds"] + row["heal_seconds"])
        blocks = rows[-1]["blocks"]
        add(placed | {"label": "E2E continued, equal time", "blocks": blocks} | continued(bench, base, max(spent)))
        # the whole block takes by far the longest to fit; its time would flatter E2E beside all other rows
        label, operator = WHOLE
        add(placed | {"label": label} | healed(bench, base, operator, placed, batches, epoch))
    return rows


def healed(
    bench: Bench, base: torch.nn.Module, operator: Options, placed: dict[str, int], batches: Any, epoch: int
) -> dict[str, Any]:
    """One candidate fitted, scored, healed for an epoch, and scored again."""
    model = copy.deepcopy(base)
    plan = replearn.plan(model, **placed, operator=operator)
    begin = bench.now()
    report = replearn.calibrate_(model, plan, batches, correction="none")
    fitting = bench.now() - begin
    before = bench.score(model)
    _, healing = bench.heal_(model, epoch, None)
    return {
        "targets": len(plan.targets),
        "blocks": plan.num_blocks,
        "operator": operator.label(),
        "parameters": plan.parameters_after,
        "unexplained": [fit.error for fit in report.fits],
        "notes": sorted({fit.note for fit in report.fits if fit.note}),
        "fit_seconds": fitting,
        "heal_seconds": healing,
        "before": before,
        "healed": bench.score(model),
    }


def continued(bench: Bench, base: torch.nn.Module, seconds: float) -> dict[str, Any]:
    """The untouched model, trained on for so long."""
    model = copy.deepcopy(base)
    taken, spent = bench.heal_(model, None, seconds)
    return {
        "targets": 0,
        "steps": taken,
        "heal_seconds": spent,
        "healed": bench.score(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def table(rows: Sequence[dict[str, Any]], metric: str, trained: float) -> str:
    cells = [
        (
            f"{row['targets']} of {row['blocks']}",
            row["label"],
            f"{row['before']:.2f}" if "before" in row else f"{trained:.2f}",
            f"{row['healed']:.2f}",
            f"{row['fit_seconds']:.1f}" if "fit_seconds" in row else "",
            f"{row['heal_seconds']:.1f}",
            f"{row['parameters']:,}",
        )
        for row in rows
    ]
    head = ("blocks out", "in their place", f"{metric} at once", "healed", "fit s", "heal s", "parameters")
    return "\n".join(text_table(head, cells, right=(2, 3, 4, 5, 6)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=RECIPES, default="lm")
    parser.add_argument("--run", type=Path, help="the folder of a run trained end to end, instead of training one")
    parser.add_argument("--architecture", help="another model for the recipe, as lm:256:12:4:1024")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--epochs", type=int, help="for the base model")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--samples", type=int, default=1024, help="training samples to fit on")
    parser.add_argument("--steps", type=int, help="of healing, instead of one epoch")
    parser.add_argument("--rank", type=int, default=32, help="of the low-rank correction")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = device_named(options.device)
    run = None if options.run is None else read_trained(options.run, device, options.data_root, full=True)
    name, epochs = RECIPES[options.model]
    recipe = replace(recipes.recipe(name), epochs=options.epochs or epochs) if run is None else run.recipe
    recipe = replace(
        recipe,
        precision="bfloat16" if device.type == "cuda" else "float32",
        compile=False,  # each healing takes one epoch, of a model that no other has
        model=options.architecture or recipe.model,
        batch_size=options.batch_size or recipe.batch_size,
    )
    torch.set_float32_matmul_precision("high")
    data = recipe.data[0] if run is None else run.result.data
    bench = Bench(recipe, data, options.data_root, options.seed, device)
    if run is None:
        base, seconds = bench.train_base()
    else:
        base, seconds = run.model, sum(epoch.seconds for epoch in run.result.epochs)
    trained = bench.score(base)
    print(
        f"{recipe.model}, {recipe.epochs} epochs end to end: {bench.metric.name} {trained:.2f} in {seconds:.1f} s"
    )

    def keep(rows: list[dict[str, Any]]) -> None:
        about = {
            "format": "replearn-heal-1",
            "script": "benchmarks/heal_after_replacement.py",
            "arguments": {
                key: str(value) if isinstance(value, Path) else value
                for key, value in vars(options).items()
                if key not in ("data_root", "out")
            },
            "recipe": recipe.to_dict(),
            "metric": bench.metric.name,
            "trained": trained,
            "trained_seconds": seconds,
            "rows": rows,
            "hardware": hardware_of(device),
            "versions": versions_of(),
        }
        write_atomically(options.out, json.dumps(about, indent=1))

    rows = measured(bench, base, options.samples, options.steps, options.rank, keep)
    print(table(rows, bench.metric.name, trained))


if __name__ == "__main__":
    main()
