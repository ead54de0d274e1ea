"""E2E's own step against a plain timm model with torch.compile: is the baseline of every ratio fast?

python benchmarks/against_timm.py --models resnet34 resnet101 vit_small_16 --out against_timm.json

Both sides train in bfloat16 and channels_last with a fused optimizer on the same batch size, in turns. The plain
side is what a timm user writes: `torch.compile(timm.create_model(...))` in the shortest loop. Ours is the E2E side
of `replearn bench steps` on its backends.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch.nn.functional import cross_entropy

from replearn.experiments.bench.cases import SUITE, Case, candidates
from replearn.experiments.bench.steps import TrainingStep, precision_of
from replearn.experiments.bench.timing import interleave, ratio
from replearn.experiments.training.results import hardware_of, versions_of, write_atomically

NAMES = {
    "resnet34": "resnet34",
    "resnet101": "resnet101",
    "vit_small_16": "vit_small_patch16_224",
    "vit_base_16": "vit_base_patch16_224",
}


def plain_step(case: Case, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model = timm.create_model(NAMES[case.model], num_classes=case.num_classes).to(
        device, memory_format=torch.channels_last
    )
    compiled = torch.compile(model.train())
    setting = case.optimizer
    if setting.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    shape = (case.batch_size, 3, case.size, case.size)
    images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(case.num_classes, (case.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(compiled(images), labels)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--backends", nargs="+", default=["captured", "compiled"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--inner", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda")
    about = {
        "format": "replearn-against-timm-1",
        "script": "benchmarks/against_timm.py",
        "arguments": {**vars(options), "out": options.out.name},
        "hardware": hardware_of(device),
        "versions": versions_of(),
        "rows": [],
    }
    for name in options.models:
        case = next(case for case in SUITE if case.model == name)
        side = candidates(case)[0]
        with precision_of("compiled"):
            bodies: dict[str, Callable[[], object]] = {"timm, compiled": plain_step(case, device)}
            for backend in options.backends:
                bodies[f"replearn E2E, {backend}"] = TrainingStep(case, side, backend, device)
            found = interleave(bodies, device, rounds=options.rounds, inner=options.inner)
        base = found["timm, compiled"]
        for label, timing in found.items():
            against = ratio(timing, base)
            row = {"case": case.title, "side": label, "milliseconds": timing.milliseconds}
            about["rows"].append({**row, "against_timm": vars(against)})
            print(f"{case.title}: {label}: {timing.median:.2f} ms, {against} of timm", flush=True)
        write_atomically(options.out, json.dumps(about, indent=1))
        del bodies
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
