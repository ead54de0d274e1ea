"""What INT8 costs and gains after deploy: accuracy before and after on real data, and CPU throughput of both.

    python benchmarks/int8.py --data cifar10 --epochs 2 --out benchmarks/results/int8_cpu.json
    python benchmarks/int8.py --random resnet34 vit_small_16 --batch 8 --out benchmarks/results/int8_cpu.json

float32 and INT8 are compared on the same CPU, in turns (the paper compares a GPU with a CPU). E2E and RepL
are trained alike, a few epochs, or taken from the folders of finished runs (--runs FOLDER ...). With --random
models of 224x224 images have random weights: throughput alone, beside the paper's.
CNNs get calibrated static INT8 (PT2E, x86), transformers dynamic INT8 of their linear layers (torchao); both
sides are deployed, folded and compiled. Calibration images are training images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

import replearn
from replearn.cli.commands.evaluate import measures_of
from replearn.deployment.quantizing import quantize
from replearn.experiments import recipes
from replearn.experiments.bench.inference import PAPER_MODELS
from replearn.experiments.bench.inference_sides import make_sides, runner
from replearn.experiments.bench.timing import Timing, interleave, ratio
from replearn.experiments.training.fit import fit
from replearn.experiments.training.paper import paper_tables
from replearn.experiments.training.recipe import Variant
from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.trained import read_trained
from replearn.surgery.plan_metadata import attached_plan

VARIANTS = (Variant(label="E2E", method="e2e"), Variant(label="RepL first=2", method="repl", first=2))


def train(name: str, model: str, variant: Variant, data: str, epochs: int, root: Path | None) -> Path:
    """A recipe's model, made smaller, after a few epochs on the CPU; the folder of its files."""
    recipe = recipes.recipe(name)
    optimizer = replace(recipe.optimizer, lr=recipe.optimizer.lr * 128 / recipe.batch_size)
    recipe = replace(recipe, model=model, epochs=epochs, batch_size=128, precision="float32", optimizer=optimizer)
    out = Path(mkdtemp())
    fit([RunSpec(recipe=recipe, variant=variant, data=data, seed=0, out=out, data_root=root)], device="cpu")
    return out


def measure(folder: Path, root: Path | None, batch: int, rounds: int) -> dict[str, Any]:
    run = read_trained(folder, root=root)
    found = measures_of(run, int8=True, images=256)
    plain = (
        replearn.deploy(run.model) if attached_plan(run.model) is not None else replearn.fast.streamline(run.model)
    )
    calibration = [x for x, _ in run.train_batches(256, 64)]
    timed = time_on_cpu(
        {"float32": plain, "int8": quantize(plain, calibration)[0]}, calibration[0][:batch], rounds
    )
    return {
        "model": run.recipe.model,
        "method": run.label,
        "data": run.result.data,
        "epochs": len(run.result.epochs),
        "int8": found["int8"],
        "accuracy": {
            side: {"top1": measures["test_accuracy"], "top5": measures["test_top5"]}
            for side, measures in found["measures"].items()
        },
        **speeds(timed, min(batch, 64)),
    }


def time_on_cpu(
    sides: Mapping[str, nn.Module], images: Tensor, rounds: int, compile: bool = True
) -> dict[str, Timing]:
    """Times of every side for the same images, in turns."""
    import torch._inductor.config as inductor

    built = {name: torch.compile(side) if compile else side for name, side in sides.items()}
    with inductor.patch(freezing=True), torch.no_grad():  # weights are constants: every side may prepack them
        # frozen graphs don't take inference mode
        bodies = {name: runner(side, images, torch.no_grad) for name, side in built.items()}
        return interleave(bodies, torch.device("cpu"), rounds=rounds)


def speeds(found: Mapping[str, Timing], batch: int, method: str = "") -> dict[str, Any]:
    """Images a second of float32 and INT8, and the speedup round by round."""
    one, other = (found[f"{method} {name}".strip()] for name in ("float32", "int8"))
    return {
        "images_per_second": {"float32": 1000 * batch / one.median, "int8": 1000 * batch / other.median},
        "int8_speedup": asdict(ratio(one, other)),
        "batch": batch,
    }


def random_rows(
    models: list[str], batch: int, rounds: int, size: int = 224, compile: bool = True
) -> list[dict[str, Any]]:
    """Throughput of every model, E2E and RepL, with random weights; the paper's values beside them.

    A row of RepL says how it does against E2E, in the same rounds: above 1 it is faster.
    """
    rows = []
    for name in models:
        made = make_sides(name, size, torch.device("cpu"), 2)
        images = torch.randn(batch, 3, size, size)
        sides: dict[str, nn.Module] = {}
        for method, plain in (
            ("E2E", replearn.fast.streamline(made.end_to_end)),
            ("RepL", replearn.deploy(made.replaced)),
        ):
            small, kind = quantize(plain, [images])
            sides |= {f"{method} float32": plain, f"{method} int8": small}
        found = time_on_cpu(sides, images, rounds, compile)
        against = {
            number: asdict(ratio(found[f"E2E {number}"], found[f"RepL {number}"]))
            for number in ("float32", "int8")
        }
        for method in ("E2E", "RepL"):
            row = {"model": name, "method": method, "int8": kind, **speeds(found, batch, method)}
            row |= {"against_e2e": against} if method == "RepL" else {}
            rows.append(row | {"compiled": compile, "paper": printed_int8(name, method)})
    return rows


def printed_int8(model: str, method: str) -> dict[str, Any] | None:
    """One row of the INT8 table; its float32 column is a GPU's and its INT8 column a CPU's."""
    for row in paper_tables()["tab:repl_quant_imagenet"].rows:
        if (PAPER_MODELS[row["backbone"]], row["method"].replace("BP", "E2E")) == (model, method):
            speeds = {"float32_images_per_second": row["fp32_speed"], "int8_images_per_second": row["int8_speed"]}
            return speeds | {"float32_top1": row["fp32_top1"], "int8_top1": row["int8_top1"]}
    return None


MODELS = (("t1_resnet32", "cifar_resnet:20:8"), ("t1_vit_tiny8", "vit:96:6:3:8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument(
        "--runs", type=Path, nargs="*", default=[], help="folders of finished runs, instead of training"
    )
    parser.add_argument("--random", nargs="*", default=[], help="models with random weights, for throughput alone")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folders = (
        []
        if options.random
        else list(options.runs)
        or [
            train(name, model, variant, options.data, options.epochs, options.data_root)
            for name, model in MODELS
            for variant in VARIANTS
        ]
    )
    rows = random_rows(options.random, options.batch, options.rounds)
    for folder in folders:
        rows.append(measure(folder, options.data_root, options.batch, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    about = {
        "format": "replearn-int8-1",
        "script": "benchmarks/int8.py",
        "arguments": {name: value for name, value in vars(options).items() if isinstance(value, (int, str))}
        | {
            "random": options.random,
            "runs": ["/".join(folder.parts[-3:]) for folder in options.runs],
        },  # data set, method, seed
        "rows": rows,
        "hardware": hardware_of(torch.device("cpu")) | {"threads": torch.get_num_threads()},
        "versions": versions_of(),
    }
    write_atomically(options.out, json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
