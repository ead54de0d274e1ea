"""Base class of the operators of ResNet blocks: a chain of convolutions, a norm, the sum with x, an activation."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..functional import norm_add_act
from .layers import Convolution, fit_norm, fresh_norm, own_activation
from .mixture import Mixtures, Weights
from .operator import MixingOperator
from .plain import as_module, residual
from .ridge import Moments, fit_rows
from .site import Site
from .synthesis import row_norms


class ChainOperator(MixingOperator):
    """act(x + norm(convolutions of x with activations between)); subclasses name the convolutions."""

    ends_in_activation = True
    chain: ClassVar[
        dict[str, str]
    ]  # by role: the block's convolution whose settings (stride, ...) and name it has
    mixed: ClassVar[str] = ""  # the role that is mixed from both sources by a and b; others have one source

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        for role, part in self.chain.items():
            self.use(site, role, like=part)
            self.add_module(part, Convolution(site.part(part), site.device))
        if self.mixed:
            self.make_coefficients(site, tuple(self._sources[self.mixed]), site.shape(self.chain[self.mixed])[0])
        self.norm = fresh_norm(site.part("norm"), site.device)
        self.activation = own_activation(site.part("activation"))
        self.last = next(reversed(self.chain))

    def convolution(self, role: str) -> Convolution:
        return getattr(self, self.chain[role])

    def mixtures(self) -> Mixtures:
        return {
            role: self.weighed(role, "rows", normalise=True) if role == self.mixed else self.mixture(role)
            for role in self.chain
        }

    def hidden(self, x: Tensor, weights: Weights) -> Tensor:
        """The input of the last convolution."""
        for role in self.chain:
            if role != self.last:
                x = self.activation(self.convolution(role)(x, weights[role]))
        return x

    def compute(self, x: Tensor) -> Tensor:
        weights = self.synthesized(x)
        y = self.convolution(self.last)(self.hidden(x, weights), weights[self.last])
        return norm_add_act(y, self.norm, self.activation, x)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.mixed:  # the coefficients multiply unit rows: a row's own length reproduces its source
            weights = self.source_weights(self.mixed).items()
            self.start_coefficients({side: row_norms(weight).flatten() for side, weight in weights})

    def regressors(self, x: Tensor) -> Tensor:
        return self.convolution(self.last).patches(self.hidden(x, self.synthesized_in_full()))

    @torch.no_grad()
    def fit(self, moments: Moments, held_out: Moments) -> float:
        """Fit the coefficients (or one scale a row, which goes into the norm), the correction, then the norm."""
        if self.last == self.mixed:
            base, _ = self.fit_factors(moments)
            weight, ridge = self.fit_correction(base, moments, held_out)
            fit_norm(self.norm, weight, moments)
            return ridge
        sources = list(self.source_weights(self.last).values())
        base = sources[0].flatten(1).double() if sources else torch.zeros_like(moments.mixed[0].T)
        scale = fit_rows(moments, [base])[0]
        if self.last not in self.corrections:
            fit_norm(self.norm, base, moments, scale=scale)
            return 0.0
        least = 1e-2 * scale.abs().max().clamp_min(1e-6)  # rows are divided by it
        scale = torch.where(scale.abs() < least, least, scale)
        weight, ridge = self.fit_correction(scale[:, None] * base, moments, held_out)
        self._correction(self.last).scale(1 / scale)
        fit_norm(self.norm, weight / scale[:, None], moments, scale=scale)
        return ridge

    def plain(self) -> nn.Module:
        weights = self.synthesized_in_full()
        *first, last = self.chain
        layers: list[nn.Module] = []
        for role in first:
            layers += [self.convolution(role).plain(weights[role], self.stored_dtype), as_module(self.activation)]
        layers.append(self.convolution(last).plain(weights[last], self.stored_dtype, self.norm))
        return residual(nn.Sequential(*layers) if first else layers[0], self.activation)
