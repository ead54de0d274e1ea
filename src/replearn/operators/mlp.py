"""MLP fusion: the block's MLP branch with the mean of the neighbours' normalised matrices.

    W_i  = (norm(prev.W_i) + norm(next.W_i)) / 2, biases averaged  (eq:vit_mlp_weight_synthesis)
    g(X) = X + MLP(LN_prev2(X))                                    (eq:vit_mlp_forward)

Nothing to learn. A gated MLP (three matrices) is treated alike: down(act(gate) * up).

Cost: the MLP's matrices, two thirds of a ViT block's; reading and normalising them costs 8 d^2 a
step.
Fails: with `sources='none'`: it reads a neighbour's norm. Without a correction it has nothing to
learn, and can be worse than removal on a trained model.
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
from .mixture import Made, Mixtures
from .options import Need, ReadingOptions
from .site import Site, one_source


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

    def mixtures(self) -> Mixtures:
        weights = {
            role: self.mixture(role, normalise=True, factor=1 / max(1, len(self._sources[role])))
            for role in self._matrices
        }
        return weights | {f"{role}_bias": self.mean_bias_mixture(role) for role in self._matrices}

    def compute(self, x: Tensor) -> Tensor:
        normed = self.norm2(x)
        made = self.synthesized(normed)
        return x + linear(self.hidden(normed, made), made["down"], made.get("down_bias"))

    def hidden(self, normed: Tensor, made: Made) -> Tensor:
        """The activations that the last matrix is applied to."""
        hidden = linear(normed, made["up"], made.get("up_bias"))
        if "gate" not in made:
            return self.activation(hidden)
        return self.activation(linear(normed, made["gate"], made.get("gate_bias"))) * hidden

    def regressors(self, x: Tensor) -> Tensor | None:
        if "down" not in self.corrections:
            return None  # without corrections nothing of this operator is learnable
        normed = self.norm2(x)
        hidden = self.hidden(normed, self.synthesized(normed))
        return hidden.reshape(-1, hidden.shape[-1])

    @torch.no_grad()
    def fit(self, moments: Moments, held: Moments) -> float:
        """Fit the correction of the last matrix and its bias; those before it stay at zero."""
        self._correction("down_bias").reset_parameters()
        self._correction("down").reset_parameters()
        made = self.made()
        weight, ridge = self.fit_correction("down", made["down"], moments, held)
        self.fit_shift("down", weight, made.get("down_bias"), moments)
        return ridge

    def plain(self) -> nn.Module:
        made = self.made()
        layers = {role: plain_linear(made[role], made.get(f"{role}_bias"), self._dtype) for role in self._matrices}
        activation = as_module(self.activation)
        if "gate" in layers:
            return residual(nn.Sequential(self.norm2.plain(), gated_mlp(layers, activation)))
        return residual(nn.Sequential(self.norm2.plain(), layers["up"], activation, layers["down"]))
