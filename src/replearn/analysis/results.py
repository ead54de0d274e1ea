"""Results of an analysis: frozen data, with the paper's symbols in the comments."""

import json
from dataclasses import dataclass

from ..planning.serialization import encode
from .view import analysis_text

FORMAT = "replearn-analysis-1"


@dataclass(frozen=True, kw_only=True)
class LocalError:
    """g_r against f_r on held-out samples; norms are Euclidean over all of a sample's activations."""

    epsilon: float  # the largest |g(h) - f(h)| / max(|h|, 1)  (eq:local_replacement_error_short)
    absolute: float  # the largest |g(h) - f(h)|
    relative: float  # |g - f|^2 over |f(h) - h|^2, summed over the samples: 0 is perfect, removal is 1
    removal: float  # epsilon of plain removal: the largest |h - f(h)| / max(|h|, 1)
    height: float  # H_r: the largest |h|


@dataclass(frozen=True, kw_only=True)
class Suffix:
    """How much the layers after a block amplify: estimates from samples, not guarantees."""

    factor: float  # the largest singular value of the suffix's Jacobian over all sampled points
    realised: float  # the largest |S(g) - S(f)| / |g - f| that was seen
    product: float  # Pi_r as printed: the product of the blocks' own factors (eq:suffix_lipschitz_short)
    change: float  # the last relative change of the estimate: how far power iteration had converged


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

    def rows(self) -> dict[str, Bias]:
        return {
            "all kept, stop-gradient": self.stopped,
            "all kept, gradients flow": self.flowing,
            "sources, stop-gradient": self.sources_stopped,
            "sources, gradients flow": self.sources_flowing,
        }


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a removed weight is from the span of two neighbours' weights, relative to its own length."""

    role: str
    span: str  # which weights span it
    whole: float  # with two scalars for the whole weight (eq:vit_proj_distance_short)
    absolute: float  # d_r: the same, not divided
    rows: float  # with two scalars per output channel (eq:cnn_span_short), over the whole weight
    best_row: float
    heads: tuple[float, ...]  # with two scalars per head, where it has heads
    chance: float  # the same for random neighbours


@dataclass(frozen=True, kw_only=True)
class TargetAnalysis:
    """One target: alone, with everything else as it was, and together with the targets before it."""

    name: str
    position: int
    operator: str
    alone: LocalError  # on the full model's activations
    together: LocalError  # on those after the replacements before it
    suffix: Suffix
    deviation: Deviation  # of the model with this target replaced and no other
    distances: tuple[Distance, ...]


@dataclass(frozen=True, kw_only=True)
class ConvergenceStep:
    """One point of a training by plain SGD; gradients and losses are those of all batches together."""

    step: int
    loss: float  # J
    squared_gradient: float  # |grad J|^2, with gradients that flow to the sources
    stop_gradient_bias: float  # |E g - grad J| / |grad J|: 0 where the steps follow grad J on average
    noise: float  # E|g - E g|^2, which is sigma^2 / B
    smoothness: float  # the largest absolute eigenvalue of J's Hessian: L_J is at least that
    shared_squared: float  # |grad_s J|^2 over the kept parameters
    full_squared: float  # |grad_s l|^2
    bias_squared: float  # |grad_s J - grad_s l|^2, which B_grad^2 bounds


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Both sides of the convergence bounds, measured over a training by plain SGD."""

    lr: float  # eta
    num_steps: int  # T
    points: tuple[ConvergenceStep, ...]

    def bound(self, number: int) -> tuple[float, float, float]:
        """Up to a point: the mean of |grad J|^2 so far, 2 (J_0 - J*) / (eta T), and eta L_J sigma^2 / B."""
        seen = self.points[: number + 1]
        end = self.points[number + 1].step if number + 1 < len(self.points) else self.num_steps
        mean = sum(point.squared_gradient for point in seen) / len(seen)
        rough, noise = max(point.smoothness for point in seen), max(point.noise for point in seen)
        return mean, 2 * seen[0].loss / (self.lr * end), self.lr * rough * noise

    def verdicts(self) -> tuple[str, ...]:
        """Whether the two statements and their assumptions hold, in words."""
        mean, start, noise = self.bound(len(self.points) - 1)
        rough = self.lr * max(point.smoothness for point in self.points)
        off = [point.stop_gradient_bias for point in self.points]
        shared = min(point.shared_squared for point in self.points)
        full = min(point.full_squared for point in self.points)
        bias = max(point.bias_squared for point in self.points)
        return (
            f"mean |grad J|^2 {mean:.3g} {'<=' if mean <= start + noise else '>'} {start + noise:.3g}, the bound",
            f"eta <= 1 / L_J {'holds' if rough <= 1 else 'does not hold'}: eta L_J is {rough:.3g} at most",
            f"steps follow grad J on average but for {min(off):.1%} to {max(off):.1%} of it, by stop-gradient"
            if max(off) > 1e-3
            else "steps follow grad J on average",
            f"min |grad_s l|^2 {full:.3g} {'<=' if full <= 2 * shared + 2 * bias else '>'} {2 * shared:.3g} + "
            f"{2 * bias:.3g}, of which the second is the measured bias",
        )


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What replacing blocks of a trained model changes; `print` shows tables."""

    model: str
    placement: str
    num_samples: int  # held out, on which everything was measured
    targets: tuple[TargetAnalysis, ...]
    together: Deviation
    gradient: GradientBias | None
    notes: tuple[str, ...] = ()
    convergence: Convergence | None = None

    def __str__(self) -> str:
        return analysis_text(self)

    def to_json(self) -> str:
        """The analysis as JSON, with the name of its format."""
        return json.dumps({"format": FORMAT, **encode(self)}, indent=1, allow_nan=False)
