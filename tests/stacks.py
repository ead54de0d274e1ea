"""A short stack of blocks of every kind, with any operator in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tiny import Bottleneck, Own
from torch import Tensor, nn

import replearn
from replearn import operators
from replearn.models.cifar_resnet import BasicBlock
from replearn.operators._base.options import Options, ReadingOptions

OPEN: dict[str, Any] = {"stop_gradient": False, "correction": "low-rank", "rank": 1}


class Encoder(nn.Module):
    """A pre-norm transformer block that keeps to its input's dtype, as those of ViTs do."""

    replearn_anatomy = replearn.anatomy(
        *("mine", "transformer"), num_heads=2, proj="attention.out_proj",
        norm1="norm1", norm2="norm2", up="up", activation="act", down="down",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.act, self.down = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(self.act(self.up(self.norm2(x))))


KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "basic": (lambda: BasicBlock(4, 4, 1), (2, 4, 6, 6)),
    "bottleneck": (lambda: Bottleneck(8), (2, 8, 6, 6)),
    "transformer": (Encoder, (2, 5, 8)),
    "any": (lambda: Own(8), (2, 8)),
}


def stack(
    kind: str,
    options: Options,
    count: int = 3,
    *,
    noise: float = 0.1,
    dtype: torch.dtype = torch.float32,
    **blocks: Any,
) -> tuple[nn.Sequential, Tensor]:
    """Blocks of a kind, every second one replaced, with weights away from their start; and a batch.

    `blocks` are built in place of those of `KINDS`.
    """
    torch.manual_seed(0)
    block, shape = KINDS[kind]
    model = nn.Sequential(*(blocks.get(kind, block)() for _ in range(count))).to(dtype)
    replearn.replace_(model, replearn.plan(model, interval=2, operator=options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model, torch.randn(shape, dtype=dtype)


def every_operator(**forms: Mapping[str, Any]) -> Iterator[Any]:
    """Each operator on each kind of block it suits: plain, and in these forms where it reads neighbours."""
    for name, options in operators.available().items():
        for kind in options.kinds:
            yield pytest.param(kind, options(), id=f"{name}-{kind}")
            for form, settings in forms.items() if issubclass(options, ReadingOptions) else ():
                yield pytest.param(kind, options(**settings), id=f"{name}-{kind}-{form}")
