"""Reduced bottleneck: the borrowed 1x1 convolutions alone. Beyond the paper.

    g(x) = relu(x + BN(next.conv3 * relu(prev.conv1 * x)))

Learnable: the BatchNorm, 2C.

Cost: two 1x1 convolutions, about half of the block's FLOPs; the paper's bottleneck operator has all of them.
Fails: on a block of another kind than `bottleneck`; nothing in it looks at a pixel's neighbours, so
a stack of them loses receptive field.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..blocks.anatomy import Anatomy
from ._base.chain import ChainOperator
from ._base.options import Need, ReadingOptions
from .functional import reduced_bottleneck


@dataclass(frozen=True, kw_only=True)
class ReducedBottleneck(ReadingOptions):
    """Borrowed reduction and expansion, no 3x3 between them (beyond the paper)."""

    name = "reduced_bottleneck"
    kinds = ("bottleneck",)

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (
            Need("reduce", like="conv1", mix=False, prefer="previous"),
            Need("expand", like="conv3", mix=False, prefer="next"),
        )


class ReducedBottleneckOperator(ChainOperator, options=ReducedBottleneck):
    chain: ClassVar = {"reduce": "conv1", "expand": "conv3"}

    def compute(self, x: Tensor) -> Tensor:
        made = self.synthesized(x)
        reduction, expansion = ((self.convolution(role), made[role]) for role in ("reduce", "expand"))
        return reduced_bottleneck(x, reduction, expansion, self.norm, self.activation)
