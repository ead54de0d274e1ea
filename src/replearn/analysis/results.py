"""What an analysis found: plain, frozen data, with the paper's symbols in the comments."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..errors import ReplearnError
from ..planning.serialization import decode, encode, parse
from .view import analysis_text

FORMAT = "replearn-analysis-1"


@dataclass(frozen=True, kw_only=True)
class LocalError:
    """g_r against f_r on held-out samples; norms are Euclidean over all of a sample's activations."""

    epsilon: float  # the largest |g(h) - f(h)| / max(|h|, 1)  (eq:local_replacement_error_short)
    mean: float  # the mean of that ratio over the samples
    absolute: float  # the largest |g(h) - f(h)|
    relative: float  # |g - f|^2 over |f(h) - h|^2, summed over the samples: 0 is perfect, removal is 1
    removal: float  # epsilon of plain removal: the largest |h - f(h)| / max(|h|, 1)
    height: float  # H_r: the largest |h|


@dataclass(frozen=True, kw_only=True)
class Suffix:
    """How much the layers after a block amplify: estimates from samples, not guarantees."""

    factor: float  # the largest singular value of the suffix's Jacobian over all sampled points
    mean: float  # its mean over the points
    realised: float  # the largest |S(g) - S(f)| / |g - f| that was seen
    product: float  # Pi_r as printed: the product of the blocks' own factors (eq:suffix_lipschitz_short)
    points: int  # samples times places between f_r(h) and g_r(h)
    starts: int
    iterations: int
    change: float  # the last relative change of the estimate: how far power iteration had converged
    disagreement: float  # the relative spread of the estimates from different starts


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far the outputs are from the full model's on held-out samples, and what bounds it."""

    measured: float  # the largest |F_RepL(x) - F(x)|
    mean: float
    relative: float  # sqrt(sum of squared deviations / sum of squared outputs)
    agreement: float  # the share of equal predictions (argmax)
    bound: float  # sum of Pi_r epsilon_r max(H_r, 1), Pi_r by power iteration (eq:output_deviation_short)
    sharp: float  # the same with the largest |g - f| itself in place of epsilon_r max(H_r, 1)
    printed: float  # the bound with Pi_r as the product of the blocks' factors


@dataclass(frozen=True, kw_only=True)
class Bias:
    """The gradient on some kept parameters, with the blocks replaced, against that of the full model."""

    true: float  # |grad l|
    measured: float  # |grad J - grad l|
    cosine: float
    through_output: float  # the part that comes from the changed output alone: what the bound is about


@dataclass(frozen=True, kw_only=True)
class GradientBias:
    """Gradient bias on shared parameters (eq:bgrad_short_short), with and without stop-gradient."""

    stopped: Bias  # all kept parameters; sources read under stop-gradient
    flowing: Bias  # all kept parameters; gradients reach the sources
    sources_stopped: Bias  # the sources' blocks alone
    sources_flowing: Bias
    sensitivity: float  # G_Theta: of the full model's gradient to its output, by power iteration
    bound: float  # B_grad (eq:bgrad_def_short), for the mean loss of a batch
    measured_bound: float  # G_Theta times the measured deviation: the assumption of eq:grad_lipschitz_short alone
    loss: float
    loss_replaced: float
    labels: str  # where the labels came from


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a removed weight is from the span of two neighbours' weights, relative to its own length."""

    role: str
    span: str  # which weights span it
    whole: float  # with two scalars for the whole weight (eq:vit_proj_distance_short)
    absolute: float  # d_r: the same, not divided
    rows: float  # with two scalars per output channel (eq:cnn_span_short), over the whole weight
    best_row: float
    worst_row: float
    heads: tuple[float, ...]  # with two scalars per head, where it has heads
    chance: float  # what two random directions would leave of a row


@dataclass(frozen=True, kw_only=True)
class TargetAnalysis:
    """One target: alone, with everything else as it was, and together with the targets before it."""

    name: str
    position: int
    operator: str
    alone: LocalError  # on the full model's activations
    together: LocalError  # on those behind the replacements before it
    suffix: Suffix
    deviation: Deviation  # of the model with this target replaced and no other
    distances: tuple[Distance, ...]


@dataclass(frozen=True, kw_only=True)
class TradeoffPoint:
    """One interval K: what it saves, and what it costs right after replacement, without training."""

    interval: int
    first: int
    targets: int
    parameters: float  # share of the full model's that is left
    flops: float  # the same, of a forward pass
    cost_formula: float  # C(K)/C_0 as printed (eq:cost_k_short), with the mean eta measured here
    eta: float  # the operators' FLOPs over their blocks'
    relative: float  # output deviation, as in Deviation
    agreement: float
    loss: float
    score: float | None
    removal_relative: float
    removal_agreement: float
    removal_loss: float
    removal_score: float | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What replacing blocks of a trained model does to it; `print` shows tables."""

    model: str
    placement: str
    num_samples: int  # held out, on which everything was measured
    targets: tuple[TargetAnalysis, ...]
    together: Deviation
    gradient: GradientBias | None
    tradeoff: tuple[TradeoffPoint, ...]
    loss: float | None
    score: float | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return analysis_text(self)

    def to_json(self) -> str:
        """The analysis as JSON, with the name of its format."""
        return json.dumps({"format": FORMAT, **encode(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Analysis:
        """Read an analysis back; ReplearnError for anything that is not one."""
        data = parse(text, "This is not an analysis: it")
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ReplearnError(f"This is not an analysis of this version of replearn ({FORMAT}).")
        read: Analysis = decode(cls, data, "analysis")
        return read
