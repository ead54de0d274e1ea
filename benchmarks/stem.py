"""A ResNet's stem at inference, torch's operations against our Triton kernels.

python benchmarks/stem.py --out benchmarks/results/stem.json

For 64 and 4 images of 224 x 224, in float16 under autocast and in TF32, in both layouts: torch's operations, ours
as `deploy` calls them, and each of our kernels with every tile of a sweep. All candidates of a case are checked
against float64 and timed as CUDA graphs of ten runs in turns. `host` in the first two rows is how long Python
takes to launch one, without waiting for the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Body, host_microseconds, measured, relative, tell
from torch import Tensor

from replearn.costs.precision import float32_products
from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.fast.kernels._triton.stem import launch_convolve_and_pool, launch_pad
from replearn.fast.kernels.stem import (
    CHANNELS,
    Walk,
    _fake,
    convolved_size,
    padded_size,
    power_of_two,
    reference,
    stem,
    walk_for,
)

STRIDE, PADDING = 2, 3
WALK = [Walk(lanes=64, steps=t, num_warps=w, num_stages=s) for t, w, s in
        itertools.product((2, 4, 7, 14, 28), (4, 8), (3, 4))]  # fmt: skip


class Case:
    """The tensors of one stem, and what float64 makes of them."""

    def __init__(self, images: int, size: int, dtype: torch.dtype, last: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        order = torch.channels_last if last else torch.contiguous_format
        self.dtype, self.last, self.device = dtype, last, device
        self.images = torch.randn(images, 3, size, size, device=device).contiguous(memory_format=order)
        weight = (torch.randn(64, 3, 7, 7, device=device) / 12).to(dtype)
        self.weight = weight.contiguous(memory_format=order)
        self.packed = weight.new_empty(64, 7, power_of_two(7) * CHANNELS)
        self.bias = torch.randn(64, 1, 1, device=device)
        self.convolved = convolved_size(self.images, weight, STRIDE, PADDING)
        self.padded = weight.new_empty(images, *padded_size(*self.convolved, STRIDE, 7), CHANNELS)
        self.out: Tensor = _fake(*self.given)

    @property
    def given(self) -> tuple[Any, ...]:
        return self.images, self.weight, self.bias, STRIDE, PADDING, self.last

    def exact(self) -> Tensor:
        double = self.images[:4].to(self.dtype).double()
        return reference(double, self.weight.double(), self.bias.double(), STRIDE, PADDING)

    def numbers(self) -> Any:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def torchs(self) -> Tensor:
        with self.numbers():
            return reference(*self.given)

    def ours(self) -> Tensor:
        with self.numbers():
            return stem(*self.given, 1)

    def parts(self) -> dict[str, tuple[Body, Any]]:
        """Each kernel alone, on what the ones before it made; the last one's result is the stem's."""

        def padding() -> Tensor:
            launch_pad(self.images, self.weight, self.padded, self.packed, PADDING)
            return self.out

        def walking(walk: Walk) -> Body:
            def run() -> Tensor:
                given = self.padded, self.packed, self.bias, self.out, self.convolved
                launch_convolve_and_pool(*given, STRIDE, self.last, walk)
                return self.out

            return run

        found: dict[str, tuple[Body, Any]] = {"pad": (padding, None)}
        used = walk_for(len(self.images), *self.out.shape[2:])
        for walk in dict.fromkeys([used, *WALK]):
            cut = f"convolve and pool, {walk.steps} steps, {walk.num_warps} warps, {walk.num_stages} stages"
            found[cut + (", in use" if walk == used else "")] = (walking(walk), asdict(walk))
        return found


def measure(case: Case, rounds: int, check: bool) -> list[dict[str, Any]]:
    candidates: dict[str, tuple[Body, Any]] = {"torch": (case.torchs, None), "ours": (case.ours, None)}
    exact = case.exact()
    for body, _ in (found := case.parts()).values():
        body()  # so that each has what it reads
    found = measured(
        candidates | found, lambda made: relative(made[:4], exact), case.device, rounds=rounds, check=check
    )
    for row in found:
        if row["by"] in candidates and "failed" not in row:
            row["host"] = host_microseconds(candidates[row["by"]][0], case.device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, nargs="+", default=[64, 4])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--check", action="store_true", help="compare values, and time nothing")
    options = parser.parse_args()
    device = torch.device(options.device)
    found: dict[str, Any] = {
        "format": "replearn-stem-1",
        "script": "benchmarks/stem.py",
        "hardware": hardware_of(device),
        "versions": versions_of(),
        "rows": [],
    }
    for images, dtype, last in itertools.product(options.images, (torch.float16, torch.float32), (False, True)):
        about = {"images": images, "dtype": str(dtype).removeprefix("torch."), "channels_last": last}
        print(f"\n{about}", flush=True)
        with torch.inference_mode(), float32_products(tf32=True, benchmark=False):
            rows = measure(Case(images, options.size, dtype, last, device), options.rounds, options.check)
        found["rows"] += [about | row for row in rows]
        tell(rows)
        write_atomically(options.out, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
