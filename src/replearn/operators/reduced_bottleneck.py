"""Reduced bottleneck: the borrowed 1x1 convolutions alone. Beyond the paper.

    g(x) = relu(x + BN(next.conv3 * relu(prev.conv1 * x)))

Learnable: the BatchNorm, 2C. About half of the block's FLOPs: the printed bottleneck operator
costs as much as the block it replaces, this one saves time too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..anatomy import Anatomy
from ..plain import as_module, residual
from .base import Operator, ReadingOperator
from .layers import Convolution, fresh_norm, own_activation
from .options import Need, ReadingOptions
from .site import Site
from .synthesis import full_precision


@dataclass(frozen=True, kw_only=True)
class ReducedBottleneck(ReadingOptions):
    """Borrowed reduction and expansion, no 3x3 between them (beyond the paper)."""

    name = "reduced_bottleneck"
    kinds = ("bottleneck",)

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (
            Need("reduce", previous="conv1", next="conv1", like="conv1", mix=False, prefer="previous"),
            Need("expand", previous="conv3", next="conv3", like="conv3", mix=False, prefer="next"),
        )

    @property
    def module(self) -> type[Operator]:
        return ReducedBottleneckOperator


class ReducedBottleneckOperator(ReadingOperator):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._dtype = site.dtype
        self.use(site, "reduce", like="conv1")
        self.use(site, "expand", like="conv3")
        self.conv1 = Convolution(site.part("conv1"), site.device)
        self.conv3 = Convolution(site.part("conv3"), site.device)
        self.norm = fresh_norm(site.part("norm"), site.device)
        self.activation = own_activation(site.part("activation"))

    def compute(self, x: Tensor) -> Tensor:
        with full_precision(x.device):
            reduce, expand = self.read_one("reduce"), self.read_one("expand")
        z = self.activation(self.conv1(x, reduce))
        return self.activation(x + self.norm(self.conv3(z, expand)))

    def plain(self) -> nn.Module:
        branch = nn.Sequential(
            self.conv1.plain(self.read_one("reduce"), self._dtype),
            as_module(self.activation),
            self.conv3.plain(self.read_one("expand"), self._dtype, self.norm),
        )
        return residual(branch, self.activation)
