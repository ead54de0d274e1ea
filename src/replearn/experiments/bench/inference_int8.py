"""INT8 against float32 and RepL against E2E on one CPU, all four in turns; deployed and, by default, compiled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ...deployment.deploy import deploy
from ...deployment.quantizing import quantize
from ...fast.inference import streamline
from ...surgery.plan_metadata import attached_plan
from ..training.trained import Trained
from .inference_paper import printed_int8
from .inference_sides import make_sides, runner
from .timing import Timing, interleave, ratio


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


def int8_measures(
    run: Trained, *, int8: bool = True, images: int = 512, size: int = 64, compile: bool = False
) -> dict[str, Any]:
    """The test metrics of a run's model, deployed, in float32 and in INT8 calibrated on training images."""
    model = run.model
    plain = deploy(model) if attached_plan(model) is not None else streamline(model)
    sides = {"float32": plain}
    found: dict[str, Any] = {"run": run.name}
    if int8:
        calibration = [x for x, _ in run.train_batches(images, size)]
        sides["int8"], found["int8"] = quantize(plain, calibration)
        found["calibration_images"] = sum(map(len, calibration))
    found["measures"] = {}
    for name, side in sides.items():
        made: Any = torch.compile(side) if compile else side
        with torch.no_grad():
            found["measures"][name] = run.task.evaluate(made, nullcontext())
    return found


def int8_rows(
    models: tuple[str, ...], size: int, batch: int, first: int, rounds: int, *, compile: bool = True
) -> list[dict[str, Any]]:
    """Throughput of every model, E2E and RepL, with random weights; the paper's values beside them.

    A row of RepL says how it does against E2E, in the same rounds: above 1 it is faster.
    """
    rows = []
    for name in models:
        made = make_sides(name, size, torch.device("cpu"), first)
        images = torch.randn(batch, 3, size, size)
        sides: dict[str, nn.Module] = {}
        for method, plain in (("E2E", streamline(made.end_to_end)), ("RepL", deploy(made.replaced))):
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
