"""Predicted against measured training steps: the cost model's ratios beside a record of `replearn bench steps`.

    python benchmarks/predicted_steps.py benchmarks/results/steps_h200.json --gpu H200 --out FILE

Needs no GPU. New records hold the predicted numbers already (`promised` in each row); this is for older ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from replearn.costs import named_machine
from replearn.experiments.bench.cases import SUITE, candidates
from replearn.experiments.bench.promised import promised
from replearn.experiments.training.results import versions_of, write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record, machine, rows = json.loads(options.record.read_text()), named_machine(options.gpu), []
    for entry in record["training"]:
        case = next(case for case in SUITE if case.model == entry["case"]["model"])
        said = promised(case, candidates(case), entry["backend"], machine)
        for row in entry["rows"]:
            if row["label"] not in said:
                continue
            own, base = said[row["label"]], said["E2E"]
            time, memory = own.over(base, "milliseconds"), own.over(base, "memory")
            rows.append(
                {
                    "model": case.model,
                    "backend": entry["backend"],
                    "candidate": row["label"],
                    "time": {"predicted": time, "measured": row["time"]["median"]},
                    "memory": {"predicted": memory, "measured": row["memory_ratio"]},
                    "memory_bytes": {"predicted": own.memory, "measured": row["memory"]},
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
