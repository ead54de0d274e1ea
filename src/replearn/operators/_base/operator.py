"""Base classes of the operators: called as the block was, with weights read from the neighbours."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from ..functional import load_faster, synthesize
from .layers import BorrowedNorm, Correction, correction_of, foldable
from .mixture import Along, Mixture, Mixtures, Weights, compute_dtype, prepared_weights
from .ridge import Moments, fit_rows, fit_scalars, solve
from .site import Site
from .synthesis import Source, upcast

if TYPE_CHECKING:
    from ...planning.data import Target
    from .options import MixingOptions, Options


LETTERS = {"previous": "a", "next": "b"}
FINE_RIDGES = tuple(10.0**exponent for exponent in range(-8, 2))


class Operator(nn.Module, ABC):
    """A computing layer g_r: stands in a block's place and reads its weights from the neighbours.

    Subclasses define the formula (`compute`), the same as plain modules (`plain`), and starting values
    (`reset_parameters`). They are final.
    """

    target: Target
    ends_in_activation = False  # True if an activation follows the residual sum, as in a ResNet's blocks

    def __init_subclass__(cls, options: type[Options] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if options is not None:
            options.module = cls

    def __init__(self, site: Site) -> None:
        super().__init__()
        if torch.cuda.is_available():
            load_faster()  # now, since torch.compile can't trace an import
        self.target = site.target
        self.stored_dtype = site.dtype  # of the block's weights, and of the deployed form
        self._input = site.target.anatomy.input
        self._as_tuple = site.target.anatomy.returns == "tuple"
        # Hugging Face models read attributes of their blocks (attention_type, layer_idx)
        own = {"a", "b", *dir(self)}
        self._block_attributes = {
            name: value
            for name, value in vars(site.block).items()
            if isinstance(value, (str, int, bool)) and not name.startswith("_") and name not in own
        }
        for name, value in self._block_attributes.items():
            setattr(self, name, value)

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The operator's formula, residual included."""

    @abstractmethod
    def plain(self) -> nn.Module:
        """The same map on one tensor, in eval mode, as ordinary modules that own their weights."""

    def num_deployed(self) -> int:
        """The number of parameters of the plain form, from shapes alone."""
        return sum(stage.num_deployed() for stage in self.stages() if stage is not self)

    def reset_parameters(self) -> None:
        """Set coefficients and corrections to their starting values, which may depend on the neighbours."""

    def stages(self) -> tuple[Operator, ...]:
        """The parts that are fitted in turn, each on the output of those before."""
        return (self,)

    def zero_branch(self) -> bool:
        """Make the branch output zero, for a fit that is worse than removal; False if this form can't."""
        norm: Any = getattr(self, "norm", None)
        if getattr(norm, "weight", None) is None or getattr(norm, "bias", None) is None:
            return False
        nn.init.zeros_(norm.weight)
        nn.init.zeros_(norm.bias)
        return True

    def regressors(self, x: Tensor) -> Tensor | None:
        """The inputs of the operator's last linear map as rows, for fitting; None if nothing can be fitted."""
        return None

    def fit(self, moments: Moments, held_out: Moments) -> float:
        """Fit the trainable parameters of the last linear map by least squares; returns the ridge."""
        raise ReplearnError(f"{self.target.name}: {self.target.operator.name} can't be fitted in closed form.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs[self._input]
        y = self.compute(x)
        return (y,) if self._as_tuple else y

    def fuse(self) -> nn.Module:
        """The deployed form, called as the block was; timm's `reparameterize_model` calls this."""
        from .plain import as_block

        with torch.no_grad():
            module = as_block(self.plain(), self.target.anatomy)
        return self.with_block_attributes(module).eval()

    def with_block_attributes(self, module: nn.Module) -> nn.Module:
        """Copy the strings and numbers that the block had as attributes to a module in its place."""
        for name, value in self._block_attributes.items():
            if not hasattr(module, name):
                setattr(module, name, value)
        return module

    def extra_repr(self) -> str:
        return f"{self.target.operator.label()}, position {self.target.position} of {self.target.stack}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Operator:
        """As nn.Module's, but the coefficients stay in float32 or float64."""
        precise = {id(tensor) for tensor in (*self.coefficients(), *self.gains())}
        precise |= {id(p.grad) for p in self.coefficients() if p.grad is not None}

        def convert(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in precise and moved.dtype.is_floating_point and moved.dtype.itemsize < 4:
                return tensor.to(moved.device)
            return moved

        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        self.stored_dtype = fn(torch.empty(0, dtype=self.stored_dtype, device="cpu")).dtype
        return self

    def gains(self) -> list[Tensor]:
        """Constant factors, 1 unless a fit changed them; they stay in float32 too."""
        return []

    def coefficients(self) -> list[nn.Parameter]:
        """The parameters without weight decay, which stay in float32: a and b."""
        return [p for name in ("a", "b") if (p := getattr(self, name, None)) is not None]


class ReadingOperator(Operator):
    """An operator with weights synthesized from sources, each with its correction."""

    last: str  # the role of the last linear map of the branch, which is fitted

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._sources: dict[str, dict[str, Source]] = {}
        self._num_synthesized = 0
        self.corrections = nn.ModuleDict()

    def use(self, site: Site, role: str, like: str | None = None, *, bias: bool = False) -> None:
        """Read a role's weight (and bias), in the shape of the block's part `like`, and add its correction."""
        self._sources[role] = site.sources(role)
        shape = site.shape(like or role)
        self._num_synthesized += math.prod(shape)
        correction = correction_of(site.options, shape, site, where=f"{site.target.name}, {role}")
        if correction is not None:
            self.corrections[role] = correction
        if bias and correction is not None:
            self.corrections[f"{role}_bias"] = Correction(shape[:1], None, site.device, site.dtype)
        if bias and (correction is not None or any(s.bias() is not None for s in self._sources[role].values())):
            self._num_synthesized += shape[0]

    def num_deployed(self) -> int:
        norms = sum(layer.num_deployed() for layer in self.children() if isinstance(layer, BorrowedNorm))
        norm = getattr(self, "norm", None)
        if norm is not None:  # a foldable one becomes the bias of the convolution before it
            norms += norm.num_features if foldable(norm) else sum(p.numel() for p in norm.parameters())
        return self._num_synthesized + norms

    def mixtures(self) -> Mixtures:
        """The weights that this operator computes with, by name; None for an absent bias."""
        return {}

    def anchors(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Dict, key and value of all that the mixtures are read from; while these stay, the mixtures are valid."""
        for sources in self._sources.values():
            for source in sources.values():
                yield from source.anchors()
        for module in (self, *self.corrections.values()):
            for register in (module._parameters, module._buffers):
                yield from ((register, name, register[name]) for name in register)

    def synthesized(self, x: Tensor) -> Weights:
        """The weights by name, in the dtype that x is computed in."""
        dtype = compute_dtype(x, self.stored_dtype)
        # a compiled graph synthesizes its own: it must not depend on what was prepared before
        weights = None if torch.compiler.is_compiling() else prepared_weights(self, dtype)
        return synthesize(self.mixtures(), dtype) if weights is None else weights

    def synthesized_in_full(self) -> Weights:
        """The weights in float32 or float64, for fitting and deployment."""
        return {name: mixture.plain() for name, mixture in self.mixtures().items() if mixture is not None}

    def mixture(self, role: str, **fields: Any) -> Mixture:
        """The role's sources and correction as a mixture with these other fields."""
        sources: dict[str, Any] = {side: source.weight() for side, source in self._sources[role].items()}
        return Mixture(**sources, correction=self.delta(role), **fields)

    def bias_mixture(self, role: str, **fields: Any) -> Mixture | None:
        """The same of the role's biases; None without any bias and correction."""
        biases: dict[str, Any] = {side: source.bias() for side, source in self._sources[role].items()}
        delta = self.delta(f"{role}_bias")
        if delta is None and all(bias is None for bias in biases.values()):
            return None
        return Mixture(**biases, correction=delta, **fields)

    def mean_bias_mixture(self, role: str, gain: Tensor | None = None) -> Mixture | None:
        """The mean of the sources' biases times the gain, plus the correction."""
        count = sum(source.bias() is not None for source in self._sources[role].values())
        return self.bias_mixture(role, factor=1 / max(1, count), **self.gain_coefficients(role, gain))

    def gain_coefficients(self, role: str, gain: Tensor | None) -> dict[str, Tensor]:
        """The gain as the coefficient of every source of a role."""
        return {} if gain is None else {LETTERS[side]: gain for side in self._sources[role]}

    def make_gain(self, site: Site) -> None:
        """Register a factor that is 1 until a fit sets it."""
        self.register_buffer("gain", torch.ones(1, device=site.device, dtype=site.upcast_dtype))

    def delta(self, role: str) -> Tensor | None:
        return self._correction(role).weight() if role in self.corrections else None

    def gains(self) -> list[Tensor]:
        return [gain] if (gain := getattr(self, "gain", None)) is not None else []

    @torch.no_grad()
    def zero_branch(self) -> bool:
        """Zero the norm at the end of the branch, or without one all coefficients, gains and corrections."""
        if hasattr(self, "norm"):
            return super().zero_branch()
        for role in self.corrections:
            self._correction(role).reset_parameters()
        for factor in (*self.coefficients(), *self.gains()):
            factor.zero_()
        return True

    def source_weights(self, role: str) -> dict[str, Tensor]:
        return {side: upcast(source.weight()) for side, source in self._sources[role].items()}

    @torch.no_grad()
    def fit_factors(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Fit the coefficients and gains of the last linear map; returns its weight and bias with them."""
        mixtures = self.mixtures()
        weight, bias = cast(Mixture, mixtures[self.last]), mixtures.get(f"{self.last}_bias")

        def current() -> tuple[Tensor, Tensor]:
            shift = torch.zeros_like(moments.mean_y[0]) if bias is None else bias.plain()
            return weight.plain().flatten(1), shift

        factors, by_row = [*self.coefficients(), *self.gains()], weight.along == "rows"
        units = []  # weight and bias with one factor at 1 and the others at 0
        for factor in factors:
            factor.zero_()
        for part in factors if by_row else [part for factor in factors for part in factor.split(1)]:
            part.fill_(1)
            units.append(current())
            part.zero_()
        if units:
            directions, shifts = zip(*units, strict=True)
            found = fit_rows(moments, directions) if by_row else fit_scalars(moments, directions, shifts)
            for factor, value in zip(factors, found.flatten().split([len(f) for f in factors]), strict=True):
                factor.copy_(value)
        base, shift = current()
        return base.double(), shift.double()

    def fit(self, moments: Moments, held_out: Moments) -> float:
        """Fit coefficients and gains of the last linear map, then the corrections of its weight and bias."""
        role = self.last
        base, shift = self.fit_factors(moments)
        weight, ridge = self.fit_correction(base, moments, held_out)
        if role in self.corrections:  # the forward scales the correction with the rest of the weight
            self._correction(role).scale(1 / cast(Mixture, self.mixtures()[role]).scale)
        if f"{role}_bias" in self.corrections:
            self._correction(f"{role}_bias").set(moments.shift(weight)[0] - shift)
        return ridge

    @torch.no_grad()
    def fit_correction(self, base: Tensor, moments: Moments, held_out: Moments) -> tuple[Tensor, float]:
        """Fit the correction of the last map on top of `base` (R, K); returns the new weight and the ridge."""
        if self.last not in self.corrections:
            return base.double(), 0.0
        correction = self._correction(self.last)
        solution = solve(moments, held_out, base[None].double(), rank=correction.rank, ridges=FINE_RIDGES)
        correction.set(solution.weight[0] - base.double(), solution.factors)
        return solution.weight[0], solution.ridge

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for role in self.corrections:
            self._correction(role).reset_parameters()
        for gain in self.gains():
            gain.fill_(1)

    def _correction(self, role: str) -> Correction:
        return cast(Correction, self.corrections[role])


class MixingOperator(ReadingOperator):
    """An operator with coefficients a and b of the previous and the next source."""

    a: nn.Parameter | None
    b: nn.Parameter | None

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._options = cast("MixingOptions", site.options)

    def make_coefficients(self, site: Site, sides: tuple[str, ...], count: int) -> None:
        """One coefficient vector per side that is read, or one for both if they are shared."""
        names = ["a"] if self._shared(sides) else [LETTERS[side] for side in sides]
        for name in ("a", "b"):
            parameter = nn.Parameter(torch.zeros(count, device=site.device, dtype=site.upcast_dtype))
            self.register_parameter(name, parameter if name in names else None)

    def _shared(self, sides: tuple[str, ...]) -> bool:
        return self._options.coefficients == "shared" and len(sides) == 2

    def coefficient(self, side: str) -> Tensor:
        shared = self._options.coefficients == "shared" and self.b is None and self.a is not None
        parameter = self.a if side == "previous" or shared else self.b
        if parameter is None:
            raise ReplearnError(f"{self.target.name} has no coefficient for its {side} source.")
        return parameter

    def weighed(self, role: str, along: Along, **fields: Any) -> Mixture:
        """The role's weight with coefficients a and b on its sources."""
        return self.mixture(role, along=along, **self.coefficients_of(role), **fields)

    def coefficients_of(self, role: str) -> dict[str, Tensor]:
        return {LETTERS[side]: self.coefficient(side) for side in self._sources[role]}

    @torch.no_grad()
    def start_coefficients(self, scales: dict[str, Tensor]) -> None:
        """Set a and b to the start that the options ask for; `scales` are those that reproduce each source."""
        start, num = self._options.start, len(scales)
        if not num:
            return

        def value(side: str) -> Tensor:
            if start == "mean":
                return scales[side] / num
            if start == "previous" or start == "next":
                return scales[side] * float(side == start)
            return torch.full_like(scales[side], 0.0 if start == "zero" else float(start))

        if self._shared(tuple(scales)):
            self.coefficient("previous").copy_((value("previous") + value("next")) / 2)
            return
        for side in scales:
            self.coefficient(side).copy_(value(side))
