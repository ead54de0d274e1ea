"""Time two checkouts of replearn in turns on one GPU: training steps and deployed models, as a user runs them.

    python benchmarks/two_versions.py --before OLD/src --after src --out two_versions.json

Each version runs in a process of its own, and the two take turns: a round is one burst of runs of either. The
ratio of a row is the median over rounds of after / before. Without a GPU, `--small` checks that the script works.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS = [
    (m, b, s)
    for m in ("resnet32", "resnet34", "vit_small_16")
    for b in ("captured", "bf16")
    for s in ("E2E", "RepL")
]
DEPLOYED = [
    (m, d, s) for m in ("resnet34", "vit_small_16") for d in ("float32", "float16") for s in ("E2E", "RepL")
]


def module(new: str, old: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"replearn.{new}")
    except ModuleNotFoundError:
        return import_module(f"replearn.{old}")


def step(model: str, backend: str, side: str, small: bool) -> Any:
    """A training step of one side, by the code of `replearn bench steps`; every layer casts its own weight."""
    import torch

    cases = module("experiments.bench.cases", "bench.cases")
    steps = module("experiments.bench.steps", "bench.steps")
    case = next(each for each in cases.SUITE if each.model == model)
    if small:
        case = cases.SMALL_SUITE[0]
    chosen = next(each for each in cases.candidates(case) if each.label == side)
    given = {"cast": False} if "cast" in inspect.signature(steps.TrainingStep.__init__).parameters else {}
    device = torch.device("cpu" if small else "cuda")
    with steps.precision_of(backend):
        made = steps.TrainingStep(case, chosen, backend, device, **given)

    def run() -> None:
        with steps.precision_of(backend):
            made()

    return run


def deployed(model: str, dtype: str, side: str, small: bool) -> Any:
    """A deployed model on 64 images, replayed as a CUDA graph."""
    import torch

    sides = module("experiments.bench.inference_sides", "bench.inference_sides")
    deploy = module("deployment.deploy", "deployment").deploy
    streamline = module("fast.inference", "streamlining").streamline
    device = torch.device("cpu" if small else "cuda")
    made = sides.make_sides("cifar_resnet:20:16" if small else model, 32 if small else 224, device, 2)
    images = torch.randn(2 if small else 64, 3, *([32, 32] if small else [224, 224]), device=device)
    form: dict[str, Any] = {"flatten": True, "graph": not small}
    if dtype == "float16" and not small:
        form["dtype"] = torch.float16
    if side == "E2E":
        ready = streamline(made.end_to_end, images, **form)
    else:
        ready = deploy(made.replaced, images, merge=True, **form)

    def run() -> None:
        with torch.inference_mode():
            ready(images)

    return run


def worker(small: bool) -> None:
    """Build what is asked for, time bursts of it on request, and answer in lines of JSON."""
    import torch

    runs: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "build":
            make = step if asked["kind"] == "step" else deployed
            run = make(*asked["what"], small)
            for _ in range(3):
                run()
            runs = {asked["key"]: run}
            answer: Any = "ready"
        else:
            run = runs[asked["key"]]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(asked["runs"]):
                run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            answer = (time.perf_counter() - begin) / asked["runs"]
        print("ANSWER " + json.dumps(answer), flush=True)


class Version:
    def __init__(self, source: Path, small: bool) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
        command = [sys.executable, __file__, "--worker", *(["--small"] if small else [])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        raise SystemExit("a version ended early; its message is above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--out", type=Path, default=Path("two_versions.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.15, help="length of a burst, about")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--worker", action="store_true")
    given = parser.parse_args()
    if given.worker:
        worker(given.small)
        return
    versions = {"before": Version(given.before, given.small), "after": Version(given.after, given.small)}
    rows = []
    work = [("step", what) for what in STEPS] + [("deployed", what) for what in DEPLOYED]
    for kind, what in work[:1] + work[-1:] if given.small else work:
        key = " ".join((kind, *what))
        for version in versions.values():
            version.ask(do="build", kind=kind, what=what, key=key)
        for version in versions.values():
            version.answer()
        times: dict[str, list[float]] = {name: [] for name in versions}
        versions["before"].ask(do="time", key=key, runs=2)
        runs = max(2, round(given.seconds / max(versions["before"].answer(), 1e-6)))
        for turn in range(given.rounds):
            for name in list(versions) if turn % 2 else reversed(list(versions)):
                versions[name].ask(do="time", key=key, runs=runs)
                times[name].append(versions[name].answer())
        ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        row = {
            "what": key,
            "before_ms": 1000 * statistics.median(times["before"]),
            "after_ms": 1000 * statistics.median(times["after"]),
            "ratio": statistics.median(ratios),
            "quartiles": [low, high],
        }
        rows.append(row)
        print(f"{key:34} {row['before_ms']:8.3f} {row['after_ms']:8.3f} ms  {row['ratio']:.3f}", flush=True)
        given.out.write_text(
            json.dumps(
                {
                    "format": "replearn-two-versions-1",
                    "command": " ".join(sys.argv),
                    "rounds": given.rounds,
                    "rows": rows,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
