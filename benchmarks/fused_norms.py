"""BatchNorm in train mode with the ReLU after it, or with a sum and the ReLU: torch's layers against our kernels.

python benchmarks/fused_norms.py --out benchmarks/results/fused_norms.json

Every candidate of a shape is run once to compile it, checked against float32, and timed as a CUDA graph of ten
runs in turns with the other: the forward pass, and both passes. The file is written anew after every shape.
`--check` compares alone.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Body, host_microseconds, measured, relative, tell
from torch import Tensor, nn

from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.fast.train.layers import fused_norms
from replearn.operators.functional import norm_add_act

# images, channels, pixels on a side: ResNet-32's two ends, then ResNet-34's and ResNet-101's
SHAPES = ((1024, 16, 32), (1024, 64, 8), (128, 64, 56), (128, 512, 7), (128, 256, 56), (128, 1024, 14))
LAST = torch.channels_last


class Ending(nn.Module):
    """How a block ends, or its middle."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: Tensor, u: Tensor | None) -> Tensor:
        return norm_add_act(x, self.norm, self.relu, u)


class Shape:
    """The tensors of one layer, and what float32 makes of them."""

    def __init__(self, images: int, channels: int, side: int, added: bool, device: torch.device) -> None:
        # Triton's interpreter, which is all that a CPU has, cuts bfloat16 off where a GPU rounds
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        torch.manual_seed(0)
        shape = (images, channels, side, side)
        drawn = [torch.randn(shape, device=device).to(dtype).contiguous(memory_format=LAST) for _ in range(3)]
        self.x, self.u, self.grad = (
            drawn[0].requires_grad_(),
            drawn[1].requires_grad_() if added else None,
            drawn[2],
        )
        self.ending = Ending(channels).to(device)
        self.exact = {name: body().float() for name, body in self.bodies(self.ending, torch.float32).items()}

    def bodies(self, ending: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Body]:
        dtype = self.x.dtype if dtype is None else dtype
        x = self.x.detach().to(dtype).requires_grad_()
        u = None if self.u is None else self.u.detach().to(dtype).requires_grad_()
        grad = self.grad.to(dtype)
        inputs = [x, *ending.parameters(), *([] if u is None else [u])]

        def forward() -> Tensor:
            made: Tensor = ending(x, u)
            return made

        def both() -> Tensor:
            return torch.autograd.grad(forward(), inputs, grad)[0]

        return {"forward": lambda: forward().detach(), "both": both}


def rows_of(shape: Shape, device: torch.device, rounds: int, check: bool) -> list[dict[str, Any]]:
    fused = copy.deepcopy(shape.ending)
    rows = []
    with fused_norms(fused):
        by_torch, ours = shape.bodies(shape.ending), shape.bodies(fused)
        for name in ("forward", "both"):
            candidates = {"torch": (by_torch[name], None), "ours": (ours[name], None)}
            exact = shape.exact[name]
            found = measured(
                candidates, lambda made, exact=exact: relative(made, exact), device, rounds=rounds, check=check
            )
            for row in found if not check else []:
                row["host"] = host_microseconds(candidates[row["by"]][0], device)
            tell(found)
            rows += [{"pass": name, **row} for row in found]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {
        "format": "replearn-fused-norms-1",
        "script": "benchmarks/fused_norms.py",
        "hardware": hardware_of(device),
        "versions": versions_of(),
        "rows": [],
    }
    for images, channels, side in SHAPES if device.type == "cuda" else ((2, 16, 4), (2, 48, 3)):
        for added in (False, True):
            print(f"{images} images, {channels} channels, {side} x {side}{', with a sum' if added else ''}")
            shape = Shape(images, channels, side, added, device)
            rows = rows_of(shape, device, arguments.rounds, arguments.check)
            about = {"images": images, "channels": channels, "side": side, "added": added}
            found["rows"] += [about | row for row in rows]
            if arguments.out:
                write_atomically(arguments.out, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
