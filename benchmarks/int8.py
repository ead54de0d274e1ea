"""What INT8 costs and gains after deploy: accuracy before and after on real data, and CPU throughput of both.

    python benchmarks/int8.py --data cifar10 --epochs 2 --out benchmarks/results/int8_cpu.json

float32 and INT8 are compared on the same CPU, in turns (the paper compares a GPU with a CPU). E2E and RepL
are trained alike, a few epochs, or taken from the folders of finished runs (--runs FOLDER ...).
CNNs get calibrated static INT8 (PT2E, x86), transformers dynamic INT8 of their linear layers (torchao); both
sides are deployed, folded and compiled. Calibration images are training images.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import replearn
from replearn.deployment.quantizing import quantize
from replearn.experiments import recipes
from replearn.experiments.bench.inference_int8 import int8_measures, speeds, time_on_cpu
from replearn.experiments.training.fit import fit
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
    found = int8_measures(run, images=256)
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


MODELS = (("t1_resnet32", "cifar_resnet:20:8"), ("t1_vit_tiny8", "vit:96:6:3:8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument(
        "--runs", type=Path, nargs="*", default=[], help="folders of finished runs, instead of training"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folders = list(options.runs) or [
        train(name, model, variant, options.data, options.epochs, options.data_root)
        for name, model in MODELS
        for variant in VARIANTS
    ]
    rows = []
    for folder in folders:
        rows.append(measure(folder, options.data_root, options.batch, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    about = {
        "format": "replearn-int8-1",
        "script": "benchmarks/int8.py",
        "arguments": {name: value for name, value in vars(options).items() if isinstance(value, (int, str))}
        | {"runs": ["/".join(folder.parts[-3:]) for folder in options.runs]},  # data set, method, seed
        "rows": rows,
        "hardware": hardware_of(torch.device("cpu")) | {"threads": torch.get_num_threads()},
        "versions": versions_of(),
    }
    write_atomically(options.out, json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
