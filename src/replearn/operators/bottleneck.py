"""Bottleneck: a bottleneck of borrowed 1x1 convolutions around a synthesized 3x3 one.

    W_c  = a_c norm(prev.conv2)_c + b_c norm(next.conv2)_c       (eq:bottleneck_mid_synthesis)
    z1   = relu(prev.conv1 * x)
    z2   = relu(W * z1)
    g(x) = relu(x + BN(next.conv3 * z2))                         (eq:bottleneck_forward)

Learnable: a, b per middle channel and the BatchNorm, 2B + 2C. Groups and dilation follow the
removed block. As many FLOPs as the block itself: it saves parameters and optimizer state, hardly
any time. `ReducedBottleneck` is the form that halves it.

Cost: the block's own shapes, so as many FLOPs; only parameters, gradients and optimizer state are
saved.
Fails: on a block of another kind than `bottleneck`; it never makes a step faster, so don't take it
for speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..blocks.anatomy import Anatomy
from ._base.layers import Convolution, fresh_norm, norm_as_affine, own_activation, silence_norm
from ._base.least_squares import Moments, Step, damped_solve, fit_rows
from ._base.mixture import Mixtures
from ._base.operator import MixingOperator, Operator
from ._base.options import MixingOptions, Need
from ._base.plain import as_module, residual
from ._base.site import Site
from ._base.synthesis import unit_rows
from .functional import norm_add_act
from .reduced_bottleneck import fit_expansion, fit_inner


@dataclass(frozen=True, kw_only=True)
class Bottleneck(MixingOptions):
    """Borrowed reduction and expansion around a synthesized convolution (the paper's)."""

    name = "bottleneck"
    kinds = ("bottleneck",)
    default_for = "bottleneck"

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (
            Need("reduce", previous="conv1", next="conv1", like="conv1", mix=False, prefer="previous"),
            Need("middle", previous="conv2", next="conv2", like="conv2"),
            Need("expand", previous="conv3", next="conv3", like="conv3", mix=False, prefer="next"),
        )

    @property
    def module(self) -> type[Operator]:
        return BottleneckOperator


class BottleneckOperator(MixingOperator):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.use(site, "reduce", like="conv1")
        self.use(site, "middle", like="conv2")
        self.use(site, "expand", like="conv3")
        self.make_coefficients(site, tuple(self._sources["middle"]), site.shape("conv2")[0])
        self.conv1 = Convolution(site.part("conv1"), site.device)
        self.conv2 = Convolution(site.part("conv2"), site.device)
        self.conv3 = Convolution(site.part("conv3"), site.device)
        self.norm = fresh_norm(site.part("norm"), site.device)
        self.activation = own_activation(site.part("activation"))

    def mixtures(self) -> Mixtures:
        middle = self.weighed("middle", "rows", normalise=True)
        return {"reduce": self.mixture("reduce"), "middle": middle, "expand": self.mixture("expand")}

    def compute(self, x: Tensor) -> Tensor:
        made = self.synthesized(x)
        z1 = self.activation(self.conv1(x, made["reduce"]))
        z2 = self.activation(self.conv2(z1, made["middle"]))
        return norm_add_act(self.conv3(z2, made["expand"]), self.norm, self.activation, x)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.start_rows("middle")

    @property
    def ends_in_activation(self) -> bool:
        return True

    def silence(self) -> bool:
        return silence_norm(self.norm)

    def regressors(self, x: Tensor) -> Tensor:
        made = self.made()
        z1 = self.activation(self.conv1(x, made["reduce"]))
        return self.conv3.patches(self.activation(self.conv2(z1, made["middle"])))

    def ways(self) -> tuple[tuple[Step, ...], ...]:
        """As it starts; or with the maps before the last fitted too.

        With corrections they follow the block's own, layer by layer. Without, a and b are fitted: a relu that is
        on passes its input, so that with the pattern of the moment the branch is linear in them.
        """
        if not self.corrections:
            last = Step("branch", self.regressors, self.fit)
            mixing = Step("branch", self._mixed_features, self._fit_mixing)
            return ((), (last, mixing), (last, mixing, last, mixing)) if self.coefficients() else ((),)
        if not self.conv1.ordinary or not self.conv2.ordinary:
            return ((),)
        return (
            (),
            (Step("conv1", self.conv1.patches, self._fit_reduce), Step("conv2", self._z1, self._fit_middle)),
        )

    def _mixed_features(self, x: Tensor) -> Tensor:
        """What a_c and b_c of every middle channel multiply, as far as the activation passes it on."""
        made = self.made()
        z1 = self.activation(self.conv1(x, made["reduce"]))
        z2 = self.conv2(z1, made["middle"])
        passed = self.activation(z2.clone()) / torch.where(z2 == 0, 1.0, z2)
        sides = [self.conv2(z1, unit_rows(weight)) for weight in self.weights("middle").values()]
        if self._shared(tuple(self._sources["middle"])):
            sides = [sides[0] + sides[1]]
        rows = [(passed * side).movedim(1, -1).reshape(-1, side.shape[1]) for side in sides]
        return torch.cat(rows, dim=1)

    @torch.no_grad()
    def _fit_mixing(self, moments: Moments, held: Moments) -> None:
        scale, _ = norm_as_affine(self.norm, torch.float64)
        expand = scale[:, None] * self.read_one("expand").flatten(1).double()  # (C, B)
        copies = len(self.coefficients())
        wide = expand.repeat(1, copies)
        system = (wide.mT @ wide) * moments.covariance()
        found = damped_solve(system[None], (wide * moments.cross()).sum(0)[None])[0]
        for coefficient, values in zip(self.coefficients(), found.chunk(copies), strict=True):
            coefficient.copy_(values)

    def _z1(self, x: Tensor) -> Tensor:
        return self.conv2.patches(self.activation(self.conv1(x, self.read_one("reduce"))))

    def _fit_reduce(self, moments: Moments, held: Moments) -> None:
        fit_inner(self, "reduce", moments, held)

    @torch.no_grad()
    def _fit_middle(self, moments: Moments, held: Moments) -> None:
        units = {side: unit_rows(weight).flatten(1).double() for side, weight in self.weights("middle").items()}
        base = torch.zeros_like(moments.mixed())
        if units and not self._shared(tuple(units)):
            found = fit_rows(moments, list(units.values()), shifted=False)
            for (side, unit), scale in zip(units.items(), found, strict=True):
                self.coefficient(side).copy_(scale)
                base += scale[:, None] * unit
        else:
            for side, unit in units.items():
                base += self.coefficient(side).double()[:, None] * unit
        self.fit_correction("middle", base, moments, held, shifted=False)

    @torch.no_grad()
    def fit(self, moments: Moments, held: Moments) -> float:
        """Fit the expansion's correction, or without one the scale of each output channel."""
        return fit_expansion(self, self.norm, moments, held)

    def plain(self) -> nn.Module:
        made = self.made()
        branch = nn.Sequential(
            self.conv1.plain(made["reduce"], self._dtype),
            as_module(self.activation),
            self.conv2.plain(made["middle"], self._dtype),
            as_module(self.activation),
            self.conv3.plain(made["expand"], self._dtype, self.norm),
        )
        return residual(branch, self.activation)
