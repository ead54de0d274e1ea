"""Narrow 3x3 convolutions, cuDNN against our Triton kernels: forward, and gradients of input and weight.

python benchmarks/narrow_convolutions.py --out benchmarks/results/narrow_convolutions.json

Every candidate of a shape is run once to compile it, checked against torch in float32, and timed as a CUDA graph
of ten runs in turns with the others. The file is written anew after every pass. `--check` compares values alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Body, measured, tell
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.fast.kernels._triton.conv3x3_small import launch_convolve, launch_sum, launch_weight
from replearn.fast.kernels.conv3x3_small import COLORS, TILES, WEIGHT_TILES, Tile, WeightTile

SHAPES = ((16, 32, 1024), (32, 16, 1024), (3, 32, 1024))  # channels, side, images
PASSES = ("forward", "input", "weight")
FIRST_LAYER = 16  # channels that come out where three go in
COLUMNS = ("pixels", "strip", "pack", "num_warps", "num_stages")
WEIGHT_COLUMNS = ("pixels", "strip", "roll", "carry", "workers", "num_warps", "num_stages")
# the most promising first, so that --limit leaves out the least
SWEEP = {
    3: [(64, 16, True, 2, 1), (128, 8, True, 4, 1), (256, 16, True, 8, 1), (128, 32, True, 4, 1)],
    16: [(128, 16, True, 4, 3), (64, 16, True, 2, 3), (128, 16, True, 4, 4), (128, 32, True, 4, 4),
         (64, 32, False, 2, 4), (64, 16, False, 2, 4), (32, 16, True, 1, 3), (128, 16, True, 4, 2),
         (128, 8, True, 4, 3), (32, 16, False, 1, 3), (128, 16, False, 4, 3)],
    32: [(128, 8, True, 4, 2), (128, 16, True, 4, 2), (256, 8, True, 8, 2), (128, 8, True, 4, 3),
         (128, 16, False, 8, 3), (128, 8, False, 8, 2), (128, 8, True, 8, 3), (64, 16, False, 4, 3)],
}  # fmt: skip
WEIGHT_SWEEP = {
    3: [(128, 16, 2, True, 528, 4, 3), (64, 32, 4, False, 528, 2, 3), (64, 32, 2, True, 528, 4, 3),
        (64, 16, 2, True, 1056, 4, 3)],
    16: [(128, 32, 2, True, 264, 4, 3), (128, 32, 2, False, 264, 4, 3), (64, 32, 2, True, 528, 4, 4),
         (64, 32, 4, False, 264, 4, 3), (64, 32, 2, False, 528, 4, 3), (128, 32, 4, True, 264, 4, 2),
         (64, 32, 4, True, 264, 4, 3), (64, 32, 2, True, 396, 4, 4), (128, 32, 4, False, 264, 4, 1)],
    32: [(128, 16, 2, True, 132, 8, 2), (64, 16, 2, True, 132, 8, 3), (32, 16, 2, True, 264, 4, 3),
         (64, 16, 2, False, 132, 8, 3), (64, 16, 4, False, 132, 8, 2), (32, 16, 2, True, 264, 4, 4),
         (32, 16, 4, False, 264, 4, 2)],
}  # fmt: skip


class Shape:
    """One convolution's tensors, and what torch makes of them in float32."""

    def __init__(self, channels: int, side: int, images: int, device: torch.device) -> None:
        def drawn(*size: int) -> Tensor:
            made = torch.randn(size, device=device).to(dtype)
            return made.contiguous(memory_format=torch.channels_last)

        # Triton's interpreter, which is all that a CPU has, multiplies bfloat16 wrongly
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        torch.manual_seed(0)
        out = FIRST_LAYER if channels == COLORS else channels
        self.channels, self.side, self.images = channels, side, images
        self.x, self.grad = drawn(images, channels, side, side), drawn(images, out, side, side)
        self.weight = drawn(out, channels, 3, 3)
        self.expected: dict[str, Tensor] = {}
        self.master = self.weight.float().contiguous(memory_format=torch.channels_last)

    @property
    def megabytes(self) -> float:
        """What must be moved at least: one tensor in and one out, or two in."""
        return (self.x.numel() + self.grad.numel()) * self.x.element_size() / 1e6

    def cudnn(self, what: str) -> Body:
        size, kernel = self.x.shape, self.weight.shape
        return {
            "forward": lambda: conv2d(self.x, self.weight, padding=1),
            "input": lambda: conv2d_input(size, self.weight, self.grad, padding=1),
            "weight": lambda: conv2d_weight(self.x, kernel, self.grad, padding=1),
        }[what]

    def triton(self, what: str, tile: Any, add: Callable[[Tensor], Tensor] = launch_sum) -> Body:
        if what == "weight":
            return lambda: add(launch_weight(self.x, self.grad, tile)).permute(0, 3, 1, 2)
        given, like, flip = (self.x, self.grad, False) if what == "forward" else (self.grad, self.x, True)

        def body() -> Tensor:
            out = torch.empty_like(like)
            launch_convolve(given, self.master, out, flip, tile)
            return out

        return body

    def error(self, what: str, found: Tensor) -> float:
        """Relative to the plain result in float32, on eight images; of the weight on all."""
        some = self.images if what == "weight" else min(8, self.images)
        if what not in self.expected:
            self.expected[what] = self.plain(what, some)
        found, expected = found if what == "weight" else found[:some], self.expected[what]
        return float((found.float() - expected).norm() / expected.norm())

    def plain(self, what: str, some: int) -> Tensor:
        x, grad, weight = self.x[:some].float(), self.grad[:some].float(), self.weight.float()
        if what == "forward":
            return conv2d(x, weight, padding=1)
        if what == "input":
            return conv2d_input(x.shape, weight, grad, padding=1)
        return conv2d_weight(x, weight.shape, grad, padding=1)


def tiles_of(what: str, channels: int) -> Iterator[Tile | WeightTile]:
    """The chosen one first."""
    first = (WEIGHT_TILES if what == "weight" else TILES)[channels]
    others: list[Tile | WeightTile] = []
    if what == "weight":
        others += [WeightTile(**dict(zip(WEIGHT_COLUMNS, row, strict=True))) for row in WEIGHT_SWEEP[channels]]
    else:
        others += [Tile(**dict(zip(COLUMNS, row, strict=True))) for row in SWEEP[channels]]
    yield first
    yield from (tile for tile in others if tile != first)


def name_of(tile: Tile | WeightTile) -> str:
    return " ".join(f"{key}={value}" for key, value in asdict(tile).items())


def measure(
    shape: Shape, what: str, device: torch.device, rounds: int, limit: int | None, check: bool
) -> list[Any]:
    candidates: dict[str, tuple[Body, Any]] = {"cuDNN": (shape.cudnn(what), None)}
    for tile in list(tiles_of(what, shape.channels))[:limit]:
        candidates[name_of(tile)] = (shape.triton(what, tile), asdict(tile))
    if what == "weight":  # how much of it is adding up what the workers found
        tile = WEIGHT_TILES[shape.channels]
        summed = shape.triton(what, tile, lambda partials: partials.sum(0))
        candidates[f"{name_of(tile)}, summed by torch"] = (summed, asdict(tile))
    rows = measured(candidates, partial(shape.error, what), device, rounds=rounds, check=check)
    for row in rows:
        if "microseconds" in row:
            row["gigabytes_per_second"] = 1000 * shape.megabytes / row["microseconds"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--limit", type=int, help="candidates for each pass, the chosen one first; all if not given"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        help="CHANNELS:SIDE:IMAGES, as 16:32:1024; 3 channels are a first layer, with 16 out",
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--check", action="store_true", help="compare values, and time nothing")
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = [tuple(map(int, text.split(":"))) for text in options.shapes or ()] or list(SHAPES)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # for what errors are measured against
    found: dict[str, Any] = {
        "format": "replearn-narrow-convolutions-1",
        "script": "benchmarks/narrow_convolutions.py",
        "hardware": hardware_of(device),
        "versions": versions_of(),
        "rows": [],
    }
    for channels, side, images in shapes:
        shape = Shape(channels, side, images, device)
        for what in options.passes:
            if (channels, what) == (COLORS, "input"):
                continue  # images have no gradient
            print(f"\n{channels} channels, {images} images of {side}x{side}, {what}", flush=True)
            rows = measure(shape, what, device, options.rounds, options.limit, options.check)
            about = {
                "channels": channels,
                "side": side,
                "images": images,
                "pass": what,
                "megabytes": shape.megabytes,
            }
            found["rows"] += [{**about, **row} for row in rows]
            tell(rows)
            write_atomically(options.out, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
