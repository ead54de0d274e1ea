"""A linear layer and its residual sum at inference, torch's operations against our Triton kernel.

python benchmarks/residual_linear.py --out benchmarks/results/residual_linear.json

Every candidate of a shape is run once to compile it (in processes beside each other first: --compilers), checked
against float64, and timed as a CUDA graph of ten runs in turns with the others. `host` is how long Python takes to
launch one, without waiting for the GPU. `plain` is u + (W h + b), `branch` is that and + B u, which torch computes
as `deploy` did before it had this kernel. The file is written anew after every shape.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernel_timing import Body, host_microseconds, measured, relative, tell
from torch import Tensor

from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.fast.kernels._triton.linear_residual import launch
from replearn.fast.kernels._triton.linear_residual_tiles import Tile, tile_for
from replearn.fast.kernels.linear_residual import linear_residual

# rows, inner width, width: ViT-S at 1, 32 and 64 images, the layer after attention and that after the MLP
SHAPES = tuple((197 * images, inner, 384) for images in (1, 32, 64) for inner in (384, 1536))
FEW = ((16, 32, 128, 4, 4), (16, 64, 128, 4, 4), (32, 32, 64, 4, 4), (32, 32, 128, 4, 4), (32, 64, 64, 4, 4))
MANY = (
    *((64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 3)),
    *((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (128, 128, 128, 8, 2)),
)


class Shape:
    """The tensors of one layer, and what float64 makes of them."""

    def __init__(self, rows: int, inner: int, width: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.u, self.bias = torch.randn(rows, width, device=device), torch.randn(width, device=device)
        self.h, self.weight, self.branch = (
            torch.randn(shape, device=device).mul_(scale).half()
            for shape, scale in (
                ((rows, inner), 1.0), ((width, inner), inner**-0.5), ((width, width), width**-0.5)
            )
        )  # fmt: skip
        self.half_bias = self.bias.half()

    def exact(self, what: str) -> Tensor:
        made = self.u.double() + F.linear(self.h.double(), self.weight.double(), self.bias.double())
        return made + F.linear(self.u.double(), self.branch.double()) if what == "branch" else made

    def torchs(self, what: str) -> Body:
        def run() -> Tensor:
            v = F.linear(self.h, self.weight, self.half_bias)
            if what == "branch":
                v.addmm_(self.u.half(), self.branch.t())
            return self.u + v

        return run

    def ours(self, what: str, tile: Tile) -> Body:
        branch = self.branch if what == "branch" else None

        def run() -> Tensor:
            out = torch.empty_like(self.u)
            launch(self.u, self.h, self.weight, self.bias, branch, out, tile)
            return out

        return run

    def door(self, what: str) -> Body:
        branch = self.branch if what == "branch" else None
        return lambda: linear_residual(self.u, self.h, self.weight, self.bias, branch)


def tiles_for(rows: int, inner: int, width: int, what: str) -> list[Tile]:
    keys = ("rows", "columns", "inner", "num_warps", "num_stages")
    sweep = [Tile(**dict(zip(keys, values, strict=True))) for values in (FEW if rows <= 1024 else MANY)]
    even = [tile for tile in sweep if inner % tile.inner == width % tile.inner == width % tile.columns == 0]
    return list(dict.fromkeys([tile_for(rows, inner, width, branched=what == "branch"), *even]))


def compile_one(rows: int, inner: int, width: int, what: str, tile: Tile) -> None:
    """In a process of its own: Triton keeps what it compiled on disk."""
    Shape(rows, inner, width, torch.device("cuda")).ours(what, tile)()


def compile_all(shapes: list[tuple[int, ...]], processes: int) -> None:
    jobs = {(what, tile): (rows, inner, width) for rows, inner, width in shapes
            for what in ("plain", "branch") for tile in tiles_for(rows, inner, width, what)}  # fmt: skip
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, *shape, what, tile) for (what, tile), shape in jobs.items()]:
            error = done.exception()
            if error is not None:
                print(f"compiling: {error}", flush=True)


def measure(shape: Shape, what: str, device: torch.device, rounds: int, check: bool) -> list[dict[str, Any]]:
    (rows, width), inner = shape.u.shape, shape.h.shape[1]
    candidates: dict[str, tuple[Body, Any]] = {"torch": (shape.torchs(what), None)}
    candidates["door"] = (shape.door(what), None)
    for number, tile in enumerate(tiles_for(rows, inner, width, what)):
        cut = f"{tile.rows}x{tile.columns}x{tile.inner}, {tile.num_warps} warps, {tile.num_stages} stages"
        candidates[cut + ("" if number else ", in use")] = (shape.ours(what, tile), asdict(tile))
    exact = shape.exact(what)
    found = measured(candidates, lambda made: relative(made, exact), device, rounds=rounds, check=check)
    for row in found:
        if "failed" not in row:
            row["host"] = host_microseconds(candidates[row["by"]][0], device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", help="ROWS:INNER:WIDTH, as 197:1536:384")
    parser.add_argument("--compilers", type=int, default=12, help="processes that compile; 0 to do it in this one")
    parser.add_argument("--check", action="store_true", help="compare values, and time nothing")
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = [tuple(map(int, text.split(":"))) for text in options.shapes or ()] or list(SHAPES)
    if options.compilers and device.type == "cuda":
        compile_all(shapes, options.compilers)
    found: dict[str, Any] = {
        "format": "replearn-residual-linear-1",
        "script": "benchmarks/residual_linear.py",
        "hardware": hardware_of(device),
        "versions": versions_of(),
        "rows": [],
    }
    for numbers in shapes:
        shape = Shape(*numbers, device)
        for what in ("plain", "branch"):
            print(f"\n{numbers[0]} rows, {numbers[1]} to {numbers[2]}, {what}", flush=True)
            with torch.inference_mode():
                rows = measure(shape, what, device, options.rounds, options.check)
            about = {"rows": numbers[0], "inner": numbers[1], "width": numbers[2], "what": what}
            found["rows"] += [about | row for row in rows]
            tell(rows)
            write_atomically(options.out, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
