"""Bottleneck: a bottleneck of borrowed 1x1 convolutions around a synthesized 3x3 one.

    W_c  = a_c norm(prev.conv2)_c + b_c norm(next.conv2)_c       (eq:bottleneck_mid_synthesis)
    z1   = relu(prev.conv1 * x)
    z2   = relu(W * z1)
    g(x) = relu(x + BN(next.conv3 * z2))                         (eq:bottleneck_forward)

Learnable: a, b per middle channel and the BatchNorm, 2B + 2C. Groups and dilation follow the removed block.

Cost: as many FLOPs as the block: it saves parameters, gradients and optimizer state, and no time.
`ReducedBottleneck` is the form that halves the FLOPs.
Fails: on a block of another kind than `bottleneck`.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..blocks.anatomy import Anatomy
from ._base.chain import ChainOperator
from ._base.options import MixingOptions, Need


@dataclass(frozen=True, kw_only=True)
class Bottleneck(MixingOptions):
    """Borrowed reduction and expansion around a synthesized convolution (the paper's)."""

    name = "bottleneck"
    kinds = ("bottleneck",)
    default_for = "bottleneck"

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (
            Need("reduce", like="conv1", mix=False, prefer="previous"),
            Need("middle", like="conv2"),
            Need("expand", like="conv3", mix=False, prefer="next"),
        )


class BottleneckOperator(ChainOperator, options=Bottleneck):
    chain: ClassVar = {"reduce": "conv1", "middle": "conv2", "expand": "conv3"}
    mixed = "middle"
