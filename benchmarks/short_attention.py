"""Attention over few tokens, torch's backends against our Triton kernels, from packed qkv to its packed gradient.

python benchmarks/short_attention.py --out benchmarks/results/short_attention.json

Every candidate of a shape is run once to compile it, checked against attention in float32, and timed as a CUDA
graph of ten runs in turns with the others: the forward pass, the backward pass (our kernels alone: torch's is not
to be had without its forward pass), and both. The file is written anew after every pass. `--check` compares alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Body, measured, relative, tell
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from replearn.experiments.training.results import hardware_of, versions_of, write_atomically
from replearn.fast.kernels._triton.attention_short import attend_back_kernel, attend_kernel, launch
from replearn.fast.kernels.attention_short import BACKWARD, FORWARD, Tile, attention_short, tile_for

SHAPES = ((512, 17, 3, 64), (512, 64, 3, 64), (1024, 10, 4, 16))  # sequences, tokens, heads, width: ViT-T/8 first
SWEEP = {  # by rows of a tile: warps, heads that a program takes, registers of a thread
    16: [(1, 1, None), (2, 1, None), (1, 2, None), (1, 4, None)],
    32: [(1, 1, None), (1, 1, 168), (1, 1, 128), (2, 1, None), (4, 1, None), (1, 3, None), (2, 3, None)],
    64: [(4, 1, None), (2, 1, None), (8, 1, None), (4, 3, None)],
}
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


class Shape:
    """The tensors of one attention layer, and what float32 makes of them."""

    def __init__(self, sequences: int, tokens: int, heads: int, width: int, device: torch.device) -> None:
        # Triton's interpreter, which is all that a CPU has, multiplies bfloat16 wrongly
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        torch.manual_seed(0)
        self.tokens, self.heads, self.width = tokens, heads, width
        size = heads * width
        self.qkv = torch.randn(sequences, tokens, 3 * size, device=device).to(dtype).requires_grad_()
        self.grad = torch.randn(sequences, tokens, size, device=device).to(dtype)
        exact = self.qkv.detach().float().requires_grad_()
        out = self.by_torch(exact, SDPBackend.MATH)
        self.exact = {"forward": out.detach(), "backward": torch.autograd.grad(out, exact, self.grad.float())[0]}
        self.exact["both"] = self.exact["backward"]

    @property
    def megabytes(self) -> dict[str, float]:
        """What must be moved at least."""
        packed, size = (tensor.numel() * tensor.element_size() / 1e6 for tensor in (self.qkv, self.grad))
        forward, backward = packed + size, 2 * packed + size
        return {"forward": forward, "backward": backward, "both": forward + backward}

    def by_torch(self, qkv: Tensor, backend: SDPBackend) -> Tensor:
        sequences, tokens, _ = qkv.shape
        q, k, v = qkv.reshape(sequences, tokens, 3, self.heads, self.width).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(sequences, tokens, -1)

    def torchs(self, what: str, backend: SDPBackend) -> Body:
        if what == "forward":
            return lambda: self.by_torch(self.qkv.detach(), backend)
        return lambda: torch.autograd.grad(self.by_torch(self.qkv, backend), self.qkv, self.grad)[0]

    def ours(self, what: str, tile: Tile) -> Body:
        qkv = self.qkv.detach()

        def forward() -> Tensor:
            out = torch.empty_like(self.grad)
            launch(attend_kernel, (qkv, out), self.heads, tile)
            return out

        def backward() -> Tensor:
            out = torch.empty_like(qkv)
            launch(attend_back_kernel, (qkv, self.grad, out), self.heads, tile)
            return out

        return forward if what == "forward" else backward

    def chosen(self) -> Body:
        return lambda: torch.autograd.grad(attention_short(self.qkv, self.heads), self.qkv, self.grad)[0]


def candidates(shape: Shape, what: str) -> dict[str, tuple[Body, Any]]:
    """Bodies by name, each with its tile if it has one; the tile in use comes first."""
    found: dict[str, tuple[Body, Any]] = {}
    if what != "backward":
        found = {name: (shape.torchs(what, backend), None) for name, backend in BACKENDS.items()}
    if what == "both":
        return {**found, "ours": (shape.chosen(), None)}
    first = tile_for(FORWARD if what == "forward" else BACKWARD, shape.tokens)
    sweep = SWEEP[first.rows]
    tiles = [Tile(rows=first.rows, num_warps=warps, heads=heads, registers=most) for warps, heads, most in sweep]
    for tile in dict.fromkeys([first, *tiles]):
        name = f"ours, {tile.num_warps} warps, {tile.heads} heads"
        name += (f", {tile.registers} registers" if tile.registers else "") + (", in use" if tile == first else "")
        found[name] = (shape.ours(what, tile), asdict(tile))
    return found


def measure(shape: Shape, what: str, device: torch.device, rounds: int, check: bool) -> list[dict[str, Any]]:
    exact, bodies = shape.exact[what], candidates(shape, what)
    rows = measured(bodies, lambda made: relative(made, exact), device, rounds=rounds, check=check)
    for row in rows:
        if "microseconds" in row:
            row["gigabytes_per_second"] = 1000 * shape.megabytes[what] / row["microseconds"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", help="SEQUENCES:TOKENS:HEADS:WIDTH, as 512:17:3:64")
    parser.add_argument("--check", action="store_true", help="compare values, and time nothing")
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = [tuple(map(int, text.split(":"))) for text in options.shapes or ()] or list(SHAPES)
    found: dict[str, Any] = {
        "format": "replearn-short-attention-1",
        "script": "benchmarks/short_attention.py",
        "hardware": hardware_of(device),
        "versions": versions_of(),
        "rows": [],
    }
    for sequences, tokens, heads, width in shapes:
        shape = Shape(sequences, tokens, heads, width, device)
        for what, megabytes in shape.megabytes.items():
            print(f"\n{sequences} sequences of {tokens} tokens, {heads} heads of {width}, {what}", flush=True)
            rows = measure(shape, what, device, options.rounds, options.check)
            about = {"sequences": sequences, "tokens": tokens, "heads": heads, "width": width}
            found["rows"] += [{**about, "pass": what, "megabytes": megabytes, **row} for row in rows]
            tell(rows)
            write_atomically(options.out, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
