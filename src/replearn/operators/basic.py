"""BasicBlock: one synthesized 3x3 convolution in place of two.

    W_c  = a_c norm(prev.conv2)_c + b_c norm(next.conv1)_c       (eq:basic_kernel_synthesis)
    g(x) = relu(x + BN(W * x))                                   (eq:basic_forward)

Learnable: a, b and the BatchNorm, 4C.

Cost: one 3x3 convolution instead of two, half of the block's FLOPs; synthesis reads 2 kernels a step.
Fails: on a block of another kind than `basic`; `sources='none'` without a correction has no weight left.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..blocks.anatomy import Anatomy
from ._base.chain import ChainOperator
from ._base.options import MixingOptions, Need


@dataclass(frozen=True, kw_only=True)
class Basic(MixingOptions):
    """One synthesized convolution with BatchNorm in place of a BasicBlock (the paper's)."""

    name = "basic"
    kinds = ("basic",)
    default_for = "basic"

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (Need("kernel", previous="conv2", next="conv1", like="conv2"),)


class BasicOperator(ChainOperator, options=Basic):
    chain: ClassVar = {"kernel": "conv2"}
    mixed = "kernel"
