"""How much accuracy a trained model keeps when its blocks are replaced afterwards, without training.

    python benchmarks/kept_after_replacement.py --recipe t1_resnet32 --epochs 40 --out kept.json

Trains the recipe end to end, then replaces blocks with operators fitted in closed form on a few calibration
images from the training set, next to plain removal; accuracy is on the test set. Nothing is chosen on the
test set: ridges come from held-out calibration batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch

import replearn
from replearn import operators, recipes
from replearn.training.architectures import architecture
from replearn.training.augmentation import DeviceImages
from replearn.training.data import load
from replearn.training.fit import device_named, fit
from replearn.training.recipe import Augment
from replearn.training.results import hardware_of, versions_of, write_atomically
from replearn.training.run import RunSpec
from replearn.training.state import read_state, under

PLACEMENTS = ((4, 4), (4, 2), (2, 2))


def trained(name: str, data: str, epochs: int, seed: int, device: str, root: Path | None) -> torch.nn.Module:
    """The recipe's model after training end to end."""
    recipe = replace(recipes.recipe(name), epochs=epochs, precision="bfloat16")
    out = Path(mkdtemp())
    spec = RunSpec(recipe=recipe, variant=recipe.variant("E2E"), data=data, seed=seed, out=out, data_root=root)
    fit([spec], device=device)
    images = load(data, root)
    model = architecture(recipe.model, num_classes=images.num_classes, channels=images.channels, size=images.size)
    model.load_state_dict(under(read_state(out / "checkpoint.safetensors")[0], "model/"))
    return model.to(device_named(device)).eval()


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: DeviceImages) -> float:
    model.eval()
    parts = zip(images.test_images.split(1000), images.test_labels.split(1000), strict=True)
    hits = sum(int((model(images.normalised(x)).argmax(1) == y).sum()) for x, y in parts)
    return 100 * hits / len(images.test_labels)


def candidates(model: torch.nn.Module) -> list[operators.Options]:
    """The operators to compare on this kind of block, from nothing to a full correction."""
    if replearn.find_stacks(model)[0].anatomies[0].kind == "basic":
        ranks = [operators.Basic(correction="low-rank", rank=rank) for rank in (4, 8, 16)]
        span = operators.Basic()
        return [operators.Removal(), operators.NoWeights(), span, *ranks, operators.Basic(correction="full")]
    ranks = [operators.Projection(correction="low-rank", rank=rank) for rank in (8, 32)]
    return [
        operators.Removal(),
        operators.NoWeights(),
        operators.Projection(),
        operators.HeadWise(),
        *ranks,
        operators.Projection(correction="full"),
        operators.HeadWise(correction="full"),
        operators.MLP(correction="full"),
        operators.AttentionMLP(correction="full", attention="head_wise"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="t1_resnet32")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, nargs="+", default=[2000])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    base = trained(options.recipe, options.data, options.epochs, options.seed, options.device, options.data_root)
    device = next(base.parameters()).device
    images = DeviceImages(load(options.data, options.data_root), Augment(), device)
    torch.set_float32_matmul_precision("highest")
    full = accuracy(base, images)
    print(f"{options.recipe}, {options.epochs} epochs end to end: {full:.2f} %", flush=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    rows = []
    for interval, first in PLACEMENTS:
        for count in options.images:
            draws = torch.zeros(count, 4, dtype=torch.int64, device=device)
            draws[:, 0] = order[:count].to(device)
            batches = [images.batch(part)[0] for part in draws.split(250)]
            for operator in candidates(base):
                model = copy.deepcopy(base)
                plan = replearn.plan(model, interval, first, operator=operator)
                begin = time.perf_counter()
                report = replearn.calibrate_(model, plan, batches)
                seconds = time.perf_counter() - begin
                kept = accuracy(model, images)
                deployed = accuracy(replearn.deploy(model), images)
                rows.append(
                    {
                        "interval": interval,
                        "first": first,
                        "targets": len(plan.targets),
                        "operator": operator.label(),
                        "calibration_images": count,
                        "accuracy": kept,
                        "deployed_accuracy": deployed,
                        "unexplained": [fit.error for fit in report.fits],
                        "parameters": plan.parameters_after,
                        "seconds": round(seconds, 2),
                    }
                )
                errors = ", ".join(f"{fit.error:.2f}" for fit in report.fits)
                print(f"K={interval} first={first} {operator.label():40s} {kept:6.2f}  ({errors})", flush=True)
    about = {
        "script": "benchmarks/kept_after_replacement.py",
        "arguments": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
        "trained_accuracy": full,
        "rows": rows,
        "hardware": hardware_of(device),
        "versions": versions_of(),
    }
    write_atomically(options.out, json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
