"""What each kernel, graph pass and trick of `replearn.fast` gives: every one switched off in turn on one GPU.

    python benchmarks/ablation.py --out benchmarks/results/ablation_h200.json

Training steps are those of `replearn bench steps`, deployed models those of `deploy(flatten=True, merge=True)` and
`streamline`. A row holds the median over rounds of (time without) / (time with), both taking turns; 1.05 means
that it gives 5 %. Without a GPU, `--small` checks that the script works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from replearn.deployment.deploy import deploy
from replearn.experiments.bench import cases, inference_sides, steps
from replearn.fast import inference, passes, registration  # noqa: F401  registers the kernels
from replearn.fast.train import accelerate as door
from replearn.operators import functional

SCOPES = ("fused_norms", "overlapped_wgrad", "short_attention", "small_convolutions", "synthesized_on_demand")
RESNET = ("fused_norms", "overlapped_wgrad", "synthesized_on_demand", "norm_add_act")
STEPS = [
    ("resnet32", "captured", (*RESNET, "small_convolutions")),
    ("resnet32", "bf16", ("norm_add_act", "synthesized_on_demand")),
    ("resnet34", "captured", RESNET),
    ("resnet34", "bf16", ("norm_add_act", "synthesized_on_demand")),
    ("resnet101", "captured", (*RESNET, "reduced_bottleneck")),
    ("resnet101", "bf16", ("norm_add_act", "reduced_bottleneck", "synthesized_on_demand")),
    ("vit_tiny_8", "captured", ("short_attention", "synthesized_on_demand")),
    ("vit_small_16", "captured", ("overlapped_wgrad", "synthesized_on_demand")),
    ("vit_small_16", "bf16", ("synthesized_on_demand",)),
]
OF_RESNETS = ("channels_last", "stem")
OF_VITS = ("layernorm_half", "linear_residual", "patch_embed", "token_slice")
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32 channels_last": {"channels_last": True},
    "float16": {"dtype": torch.float16},
    "float32 graph": {"graph": True},
    "float16 graph": {"dtype": torch.float16, "graph": True},
    "float16 fuse graph": {"dtype": torch.float16, "graph": True, "fuse": True},
}
TINY8 = cases.Case(model="vit_tiny_8", batch_size=1024, optimizer=cases.ADAMW)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Switch one thing off."""
    if name in SCOPES:
        with patch.object(door, name, lambda model: nullcontext()):
            yield
    elif name in functional._faster:
        with patch.dict(functional._faster, {name: lambda *args, **kwargs: None}):
            yield
    elif name != "nothing":
        kept = [each for each in passes.passes() if each[0] != name]
        assert len(kept) < len(list(passes.passes())), f"there is no {name}"
        with patch.object(passes, "passes", lambda: iter(kept)):
            yield
    else:
        yield


def step(model: str, backend: Any, side: str, name: str, device: torch.device) -> Callable[[], None]:
    case = next((each for each in cases.SUITE if each.model == model), TINY8)
    if device.type == "cpu":
        case = cases.SMALL_SUITE[0 if "resnet" in model else 1]
    chosen = next(each for each in cases.candidates(case) if each.label == side)
    with without(name), steps.precision_of(backend):
        made = steps.TrainingStep(case, chosen, backend, device)

    def run(times: int) -> None:
        with without(name), steps.precision_of(backend):
            for _ in range(times):
                made()

    return run  # type: ignore[return-value]


def deployed(made: Any, form: dict[str, Any], images: Any, side: str, name: str) -> Callable[[], None]:
    with without(name):
        if side == "E2E":
            ready = inference.streamline(made.end_to_end, images, flatten=True, **form)
        else:
            ready = deploy(made.replaced, images, merge=True, flatten=True, **form)

    def run(times: int) -> None:
        with without(name), torch.inference_mode():
            for _ in range(times):
                ready(images)

    return run  # type: ignore[return-value]


def timed(run: Any, times: int) -> float:
    synchronize()
    begin = time.perf_counter()
    run(times)
    synchronize()
    return (time.perf_counter() - begin) / times


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(build: Callable[[str], Any], names: tuple[str, ...], rounds: int, seconds: float) -> dict[str, Any]:
    """Ratios of the time without each thing to the time with all, in turns."""
    runs = {name: build(name) for name in ("nothing", *names)}
    for run in runs.values():
        run(4)
    times = max(2, round(seconds / timed(runs["nothing"], 2)))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 else reversed(list(runs)):
            taken[name].append(timed(runs[name], times))
    found: dict[str, Any] = {"ms": 1000 * statistics.median(taken["nothing"])}
    for name in names:
        ratios = [a / b for a, b in zip(taken[name], taken["nothing"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {"ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ablation.json"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.06, help="length of a burst, about")
    parser.add_argument("--only", default="", help="rows whose name begins so, as 'deployed vit'")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    device = torch.device("cpu" if given.small else "cuda")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    head: dict[str, Any] = {
        "format": "replearn-ablation-1",
        "command": " ".join(sys.argv),
        "commit": commit,
        "torch": torch.__version__,
    }
    head["device"] = "cpu" if given.small else torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []

    def note(what: str, build: Callable[[str], Any], names: tuple[str, ...]) -> None:
        if not what.startswith(given.only):
            return
        try:
            row = {"what": what, **compare(build, names, given.rounds, given.seconds)}
        except Exception as error:  # one case that can't run leaves the others
            row = {"what": what, "error": f"{type(error).__name__}: {error}"[:300]}
        rows.append(row)
        short = {key: value["ratio"] if isinstance(value, dict) else value for key, value in row.items()}
        print(json.dumps(short), flush=True)
        given.out.write_text(json.dumps({**head, "rows": rows}, indent=1))
        torch.cuda.empty_cache()

    for model, backend, names in STEPS[:1] if given.small else STEPS:
        build = partial(step, model, backend, "RepL", device=device)
        note(f"step {model} {backend} RepL", lambda name, build=build: build(name=name), names)
    for model, names in (("resnet34", OF_RESNETS), ("resnet101", OF_RESNETS), ("vit_small_16", OF_VITS)):
        name = "cifar_resnet:20:16" if given.small else model
        size = 32 if given.small else 224
        made = inference_sides.make_sides(name, size, device, 2)
        for form, options in list(FORMS.items())[: 1 if given.small else None]:
            if options.get("fuse") and "vit" in model:
                continue
            for batch in (2,) if given.small else (64, 1):
                images = torch.randn(batch, 3, size, size, device=device)
                more = ("conv_bias_add_relu",) if options.get("fuse") else ()
                build = partial(deployed, made, options, images, "RepL")
                note(f"deployed {model} {form} batch {batch}", build, (*names, *more))


if __name__ == "__main__":
    main()
