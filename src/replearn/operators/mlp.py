"""MLP fusion: the block's MLP branch with the mean of the neighbours' normalised matrices.

    W_i  = (norm(prev.W_i) + norm(next.W_i)) / 2, biases averaged  (eq:vit_mlp_weight_synthesis)
    g(X) = X + MLP(LN_prev2(X))                                    (eq:vit_mlp_forward)

Learnable: nothing but a correction. In a gated MLP (three matrices) it is down(act(gate) * up). The last matrix
and its bias have a constant factor, 1 in the paper, which a fit to a trained block may change.

Cost: the MLP's matrices, two thirds of a ViT block's; reading and normalising them costs 8 d^2 a step.
Fails: with `sources='none'`: it reads a neighbour's norm.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import linear

from ..blocks.anatomy import Anatomy
from ..errors import ReplearnError
from ._base.layers import BorrowedNorm, own_activation, plain_linear
from ._base.mixture import Mixture, Mixtures, Weights
from ._base.operator import ReadingOperator
from ._base.options import Need, ReadingOptions
from ._base.plain import as_module, gated_mlp, residual
from ._base.site import Site


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
        return (*map(Need, matrices_of(anatomy)), Need("norm2", mix=False))


class MLPOperator(ReadingOperator, options=MLP):
    gain: Tensor
    last = "down"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._matrices = matrices_of(site.target.anatomy)
        for role in self._matrices:
            self.use(site, role, bias=True)
        self.norm2 = BorrowedNorm(site.source("norm2"), site.device)
        self.activation = own_activation(site.part("activation"))
        self.make_gain(site)

    def mixtures(self) -> Mixtures:
        mixtures: dict[str, Mixture | None] = {}
        for role in self._matrices:
            gain, share = self.gain if role == "down" else None, 1 / max(1, len(self._sources[role]))
            mixtures[role] = self.mixture(role, normalise=True, factor=share, **self.gain_coefficients(role, gain))
            mixtures[f"{role}_bias"] = self.mean_bias_mixture(role, gain)
        return mixtures

    def compute(self, x: Tensor) -> Tensor:
        normed = self.norm2(x)
        weights = self.synthesized(normed)
        return x + linear(self.hidden(normed, weights), weights["down"], weights.get("down_bias"))

    def hidden(self, normed: Tensor, weights: Weights) -> Tensor:
        """The input of the last matrix."""
        hidden = linear(normed, weights["up"], weights.get("up_bias"))
        if "gate" not in weights:
            return self.activation(hidden)
        return self.activation(linear(normed, weights["gate"], weights.get("gate_bias"))) * hidden

    def regressors(self, x: Tensor) -> Tensor:
        normed = self.norm2(x)
        hidden = self.hidden(normed, self.synthesized(normed))
        return hidden.reshape(-1, hidden.shape[-1])

    def plain(self) -> nn.Module:
        weights, dtype = self.synthesized_in_full(), self.stored_dtype
        layers = {role: plain_linear(weights[role], weights.get(f"{role}_bias"), dtype) for role in self._matrices}
        activation = as_module(self.activation)
        if "gate" in layers:
            return residual(nn.Sequential(self.norm2.plain(), gated_mlp(layers, activation)))
        return residual(nn.Sequential(self.norm2.plain(), layers["up"], activation, layers["down"]))


def matrices_of(anatomy: Anatomy) -> tuple[str, ...]:
    return ("up", "gate", "down") if "gate" in anatomy.parts else ("up", "down")
