"""Triton kernel of LayerNorm with a half-precision output: a program loads whole rows once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch as launch_kernel

jit: Any = triton.jit
NUMBERS = 2048  # elements of a program


@jit(do_not_specialize=["rows"])
def norm_kernel(
    x, weight, bias, out, rows, epsilon,
    WIDTH: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SIDE)[None, :]
    inside = (row < rows) & (column < WIDTH)
    at = row * WIDTH + column
    value = tl.load(x + at, mask=inside, other=0.0)
    centred = tl.where(column < WIDTH, value - tl.sum(value, 1)[:, None] / WIDTH, 0.0)
    made = centred * tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / WIDTH + epsilon)
    if SCALED:
        made *= tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if SHIFTED:
        made += tl.load(bias + column, mask=column < WIDTH, other=0.0)
    tl.store(out + at, made.to(out.dtype.element_ty), mask=inside)


def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, out: Tensor) -> None:
    """layer_norm(x) into `out`; all tensors are contiguous and aligned to 16 bytes."""
    width = x.shape[-1]
    rows, side = x.numel() // width, triton.next_power_of_2(width)
    together = max(1, NUMBERS // side)
    tensors = (x, x if weight is None else weight, x if bias is None else bias, out)
    constants = (width, side, together, weight is not None, bias is not None)
    launch_kernel(norm_kernel, -(-rows // together), x, *tensors, rows, epsilon, *constants, num_warps=4)
