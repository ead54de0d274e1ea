"""MLP fusion: the block's MLP branch with the mean of the neighbours' normalised matrices.

    W_i  = (norm(prev.W_i) + norm(next.W_i)) / 2, biases averaged  (eq:vit_mlp_weight_synthesis)
    g(X) = X + MLP(LN_prev2(X))                                    (eq:vit_mlp_forward)

Nothing to learn. A gated MLP (three matrices) is treated alike: down(act(gate) * up).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..anatomy import Anatomy
from ..errors import ReplearnError
from ..plain import as_module, gated_mlp, residual
from .base import Operator, ReadingOperator
from .fitting import Moments
from .layers import BorrowedNorm, own_activation, plain_linear
from .options import Need, ReadingOptions
from .site import Site, one_source
from .synthesis import as_computed, full_precision, unit_rows


@dataclass(frozen=True, kw_only=True)
class MLP(ReadingOptions):
    """The MLP branch alone, fused from the neighbours' (the paper's optional form)."""

    name = "mlp"
    kinds = ("transformer",)

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        if not self.sides:
            raise ReplearnError(
                "MLP reads a neighbour's norm, so sources can't be 'none'. Write 'previous' or 'next' for one."
            )
        matrices = ("up", "gate", "down") if "gate" in anatomy.parts else ("up", "down")
        mixed = (Need(role, previous=role, next=role, like=role) for role in matrices)
        return (*mixed, Need("norm2", previous="norm2", next="norm2", like="norm2", mix=False))

    @property
    def module(self) -> type[Operator]:
        return MLPOperator


class MLPOperator(ReadingOperator):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._matrices = ("up", "gate", "down") if "gate" in site.target.anatomy.parts else ("up", "down")
        for role in self._matrices:
            self.use(site, role)
            self.use_bias(site, role)
        self.norm2 = BorrowedNorm(one_source(site, "norm2"), site.device)
        self.activation = own_activation(site.part("activation"))

    def weight_and_bias(self, role: str) -> tuple[Tensor, Tensor | None]:
        weights = self.weights(role)
        terms = [unit_rows(weight) / len(weights) for weight in weights.values()]
        return self.corrected(role, terms), self.mean_bias(role)

    def compute(self, x: Tensor) -> Tensor:
        with full_precision(x.device):
            weight, bias = self.weight_and_bias("down")
        hidden = self.hidden(x)
        bias = None if bias is None else as_computed(bias, hidden)
        return x + linear(hidden, as_computed(weight, hidden), bias)

    def hidden(self, x: Tensor) -> Tensor:
        """The activations that the last matrix is applied to."""
        with full_precision(x.device):
            layers = {role: self.weight_and_bias(role) for role in self._matrices if role != "down"}

        def apply(role: str, tokens: Tensor) -> Tensor:
            weight, bias = layers[role]
            return linear(tokens, as_computed(weight, tokens), None if bias is None else as_computed(bias, tokens))

        normed = self.norm2(x)
        hidden = apply("up", normed)
        gated = "gate" in layers
        return self.activation(apply("gate", normed)) * hidden if gated else self.activation(hidden)

    def regressors(self, x: Tensor) -> Tensor | None:
        if "down" not in self.corrections:
            return None  # without corrections nothing of this operator is learnable
        hidden = self.hidden(x)
        return hidden.reshape(-1, hidden.shape[-1])

    @torch.no_grad()
    def fit(self, moments: Moments, held: Moments) -> float:
        """Fit the correction of the last matrix and its bias; those before it stay at zero."""
        self._correction("down_bias").reset_parameters()
        self._correction("down").reset_parameters()
        base, bias = self.weight_and_bias("down")
        weight, ridge = self.fit_correction("down", base, moments, held)
        self.fit_shift("down", weight, bias, moments)
        return ridge

    def plain(self) -> nn.Module:
        layers = {role: plain_linear(*self.weight_and_bias(role), self._dtype) for role in self._matrices}
        activation = as_module(self.activation)
        if "gate" in layers:
            return residual(nn.Sequential(self.norm2.plain(), gated_mlp(layers, activation)))
        return residual(nn.Sequential(self.norm2.plain(), layers["up"], activation, layers["down"]))
