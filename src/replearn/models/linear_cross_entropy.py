"""Cross-entropy of a linear output layer for large vocabularies: only a few rows of logits exist at a time.

    loss = mean over the targets that count of  logsumexp(W h) - (W h)[target]

The usual way keeps the logits of all words (8,192 words x 28,783 are 0.9 GB in float32), their softmax and their
gradient. Here a few rows are made at a time, and while they are there, their part of the gradients of
h and W too: nothing is computed twice, and the backward pass only scales what is there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

EVEN = 64  # a half-precision product with an odd number of words runs on a GPU's slow, unaligned kernels
ROWS = 2048  # logits made at a time: enough to fill a large GPU, and 0.24 GB in float32 for 28,783 words
IGNORED = -100


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int = ROWS) -> Tensor:
    """The mean cross-entropy of `hidden @ weight.T`; targets of -100 do not count, and without any it is 0.

    `hidden` is (..., d), `weight` (words, d), `targets` (...). Under autocast the products are in its dtype;
    softmax and sums are in float32 (float64 for float64 weights) in any case.

    >>> h, w, y = torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, 6, 2, -100, 1])
    >>> torch.allclose(linear_cross_entropy(h, w, y), torch.nn.functional.cross_entropy(h @ w.T, y), atol=1e-6)
    True
    """
    kind = hidden.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    flat, aims = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    with torch.autocast(kind, enabled=False):
        return _LinearCrossEntropy.apply(flat, weight, aims, rows, low)  # type: ignore[no-untyped-call]


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, low: torch.dtype) -> Tensor:
        high = torch.promote_types(weight.dtype, torch.float32)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        words = len(weight)
        matrix = aligned(weight.to(low))
        real = targets != IGNORED
        share = 1 / real.sum().clamp(min=1).to(high)
        loss = torch.zeros((), dtype=high, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(matrix, dtype=high) if needs_weight else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            h, counts = hidden[part].to(low), real[part, None]
            aims = torch.where(real[part], targets[part], 0)[:, None]
            scores = h @ matrix.T
            scores[:, words:] = -torch.inf
            logs = torch.log_softmax(scores, 1, dtype=high)
            aimed = logs.gather(1, aims)
            loss -= (aimed * counts).sum()
            if not (needs_hidden or needs_weight):
                continue
            # softmax - one-hot, in the place of its logarithm; rows that don't count are left out of the products
            slope = logs.exp_().scatter_(1, aims, aimed.exp() - 1).to(low)
            if d_hidden is not None:
                d_hidden[part] = (slope @ matrix) * counts
            if d_weight is not None:
                d_weight += slope.T @ (h * counts)
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight[:words], share)
        return loss * share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, share = ctx.saved_tensors
        scale = grads[0] * share
        scaled_hidden = None if d_hidden is None else d_hidden * scale.to(d_hidden.dtype)
        scaled_weight = None if d_weight is None else d_weight * scale
        return scaled_hidden, scaled_weight, None, None, None


def aligned(matrix: Tensor) -> Tensor:
    """The matrix with zeros below, up to a multiple of EVEN, where its dtype has kernels that ask for it."""
    if matrix.dtype not in (torch.bfloat16, torch.float16):
        return matrix
    return pad(matrix, (0, 0, 0, -len(matrix) % EVEN))
