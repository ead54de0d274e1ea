"""Predicted against measured training steps: the cost model's ratios beside a record of `replearn bench steps`.

    python benchmarks/predicted_steps.py benchmarks/results/steps_h200.json --gpu H200 --out FILE

Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from replearn.costs import Machine, named_machine, predict
from replearn.experiments.bench.cases import SUITE, Case, candidates
from replearn.experiments.training.results import versions_of, write_atomically
from replearn.fast.kernels import reduced_bottleneck


def predicted(case: Case, backend: str, machine: Machine) -> dict[str, Any]:
    """The cost of every candidate's training step from shapes alone, by label."""
    layout = torch.contiguous_format if backend == "tf32" else torch.channels_last
    example = torch.empty(case.batch_size, 3, case.size, case.size, device="meta", memory_format=layout)
    precision = "tf32" if backend == "tf32" else "bfloat16"
    states = "sgd_momentum" if case.optimizer.name == "sgd" else case.optimizer.name
    found = {}
    for side in candidates(case):
        model = side.build().to("meta")
        captured = backend in ("captured", "compiled")  # launches are free there
        with patch.object(reduced_bottleneck, "is_capturing_here", lambda captured=captured: captured):
            found[side.label] = predict(model, example, optimizer=states, precision=precision, machine=machine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record, machine, rows = json.loads(options.record.read_text()), named_machine(options.gpu), []
    for entry in record["training"]:
        case = next(case for case in SUITE if case.model == entry["case"]["model"])
        said = predicted(case, entry["backend"], machine)
        for row in entry["rows"]:
            if row["label"] not in said:
                continue
            own, base = said[row["label"]], said["E2E"]
            time, memory = own.total.seconds / base.total.seconds, own.peak_bytes / base.peak_bytes
            rows.append(
                {
                    "model": case.model,
                    "backend": entry["backend"],
                    "candidate": row["label"],
                    "time": {"predicted": time, "measured": row["time"]["median"]},
                    "memory": {"predicted": memory, "measured": row["memory_ratio"]},
                    "memory_bytes": {"predicted": own.peak_bytes, "measured": row["memory"]},
                }
            )
            print(
                f"{case.model:14} {entry['backend']:9} {row['label']:18} "
                f"time {time:.3f} {row['time']['median']:.3f}   "
                f"memory {memory:.3f} {row['memory_ratio']:.3f}",
                flush=True,
            )
    about = {
        "format": "replearn-promise-steps-1",
        "command": " ".join(["python", *sys.argv]),
        "record": options.record.name,
        "hardware": record["hardware"],
        "predicted_for": asdict(machine),
        "rows": rows,
        "versions": record["versions"],  # of the measurement
        "predicted_with": versions_of(),
    }
    write_atomically(options.out, json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
