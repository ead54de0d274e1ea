"""INT8 against float32 on the same CPU, in turns; both sides deployed and, unless asked otherwise, compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ...deployment.deploy import deploy
from ...deployment.quantizing import quantize
from ...fast.inference import streamline
from .inference_paper import quantized_rows
from .inference_sides import make_sides
from .timing import interleave, ratio


def time_int8(
    plain: nn.Module, small: nn.Module, images: Tensor, rounds: int, compile: bool = True
) -> dict[str, Any]:
    """Images a second of both, and the speedup round by round."""
    import torch._inductor.config as inductor

    sides: dict[str, Any] = {"float32": plain, "int8": small}
    if compile:
        sides = {name: torch.compile(side) for name, side in sides.items()}
    with inductor.patch(freezing=True), torch.no_grad():  # weights are constants: both sides may prepack them
        bodies = {name: forward_of(side, images) for name, side in sides.items()}
        found = interleave(bodies, torch.device("cpu"), rounds=rounds)
    return {
        "images_per_second": {name: 1000 * len(images) / timing.median for name, timing in found.items()},
        "int8_speedup": asdict(ratio(found["float32"], found["int8"])),
        "batch": len(images),
        "compiled": compile,
    }


def forward_of(side: Any, images: Tensor) -> Callable[[], object]:
    """One pass outside inference mode, which frozen graphs do not take."""

    def run() -> object:
        with torch.no_grad():
            return side(images)

    return run


def int8_rows(
    models: tuple[str, ...], size: int, batch: int, first: int, rounds: int, *, compile: bool = True
) -> list[dict[str, Any]]:
    """Throughput of every model, E2E and RepL, with random weights; the paper's values beside them."""
    rows = []
    for name in models:
        sides = make_sides(name, size, torch.device("cpu"), first)
        images = torch.randn(batch, 3, size, size)
        for method, plain in (("E2E", streamline(sides.end_to_end)), ("RepL", deploy(sides.replaced))):
            small, kind = quantize(plain, [images])
            paper = [asdict(row) for row in quantized_rows() if (row.model, row.method) == (name, method)]
            timed = time_int8(plain, small, images, rounds, compile)
            rows.append(
                {"model": name, "method": method, "int8": kind, **timed, "paper": paper[0] if paper else None}
            )
    return rows
