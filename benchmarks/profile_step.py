"""Where the time of a training step goes on a GPU: kernels by name, from torch.profiler.

python benchmarks/profile_step.py --model resnet32 --backend compiled --out profile_resnet32.json
python benchmarks/profile_step.py --model vit_tiny_8 --batch-size 512 --out profile_vit_tiny8.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from replearn.cli.commands.bench import case_of
from replearn.experiments.bench.cases import candidates
from replearn.experiments.bench.steps import TrainingStep, precision_of
from replearn.experiments.training.results import hardware_of, versions_of, write_atomically

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet32", help="a name that `replearn bench steps` takes")
    parser.add_argument("--batch-size", type=int, help="that of `replearn bench steps` if not given")
    parser.add_argument("--side", default="E2E", help="E2E, removal or RepL")
    parser.add_argument("--backend", default="compiled", choices=["tf32", "bf16", "captured", "compiled"])
    parser.add_argument("--cudnn", action="store_true", help="leave narrow convolutions to cuDNN")
    parser.add_argument("--sdpa", action="store_true", help="leave attention over few tokens to torch")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda")
    case = case_of(options.model, 4, None, options.batch_size, None, device)
    side = next(side for side in candidates(case) if side.label == options.side)
    with precision_of(options.backend):
        step = TrainingStep(case, side, options.backend, device, narrow=not options.cudnn, short=not options.sdpa)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                step.body()  # the kernels by name, which a replayed graph hides
            torch.cuda.synchronize()
    rows = [
        {"kernel": event.key, "ms": event.self_device_time_total / 1000 / STEPS, "launches": event.count / STEPS}
        for event in found.key_averages()
        if event.device_type.name == "CUDA"
    ]
    rows.sort(key=lambda row: -row["ms"])
    about = {
        "format": "replearn-profile-1",
        "script": "benchmarks/profile_step.py",
        "case": case.title,
        "side": side.label,
        "backend": options.backend,
        "narrow_convolutions": step.narrow,
        "short_attention": step.short,
        "ms": sum(row["ms"] for row in rows),
        "launches": sum(row["launches"] for row in rows),
        "kernels": rows,
        "hardware": hardware_of(device),
        "versions": versions_of(),
    }
    write_atomically(options.out, json.dumps(about, indent=1))
    print(f"{case.title}, {side.label}, {options.backend}: {about['ms']:.2f} ms, {about['launches']:.0f} launches")
    for row in rows[:20]:
        print(f"{row['ms']:8.3f} ms {row['launches']:6.0f} x  {row['kernel'][:100]}")


if __name__ == "__main__":
    main()
