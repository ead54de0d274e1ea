"""Fit what stands in one block's place, on the visits of a walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..blocks.running import PrivateRandom
from ..errors import ReplearnError
from ..operators._base.ridge import Moments, Solution, solve
from .calls import Tap
from .corrections import (
    Channels,
    Correction,
    OnLast,
    after_of,
    attention_half,
    image_map,
    mlp_half,
    origin,
    pass_through,
    token_map,
)
from .layers import LayerFit, aims_of, in_old_norms, realign_block_, statistics, teacher_values, write_
from .rows import rows, set_matrix_, share_of_rows
from .structure import Structure, understand
from .walking import Visit

Form = Literal["removal", "channels", "low-rank", "full", "mlp", "attention"]
FORMS: tuple[Form, ...] = ("removal", "channels", "low-rank", "full", "mlp", "attention")


@dataclass(frozen=True, slots=True)
class BlockFit:
    """What stands in a block's place; errors on held-out rows, as shares of the aim's power without the input."""

    name: str
    form: Form
    error: float
    removal_error: float
    ridge: float
    layers: tuple[LayerFit, ...] = ()


@dataclass(frozen=True, eq=False)
class Place:
    """A block that goes: itself in the student, its structure, what it returned."""

    name: str
    block: nn.Module
    structure: Structure
    argument: str
    length: int

    def removed(self) -> nn.Module:
        """Nothing, in a form that takes what the block took."""
        return pass_through(self.argument, self.length)


def fit_block(
    place: Place, form: Form, teacher: nn.Module, taught: Sequence[Visit], student: Sequence[Visit], rank: int
) -> tuple[nn.Module, BlockFit, list[Tensor]]:
    """Fit one form; returns it, how well it does, and the outputs of the untouched block."""
    structure = place.structure
    clear = structure.residual and structure.after is not None
    aim = Tap(structure.sums[-1].key) if clear else None
    if form in ("mlp", "attention"):
        made = _half(place, form, teacher, taught, student)
        if made is not None:
            return made
        form = "full"
    outputs, values = teacher_values(teacher, taught, [aim] if aim else [])
    aims = [found[aim] for found in values] if aim else outputs
    if form == "removal":
        return place.removed(), BlockFit(place.name, form, 1.0, 1.0, 0.0), outputs
    after = after_of(place.block, structure) if clear else None
    fitted, fit = _map(place, form, aims, student, rank)
    if fitted is None:
        return place.removed(), fit, outputs
    whole = Correction(fitted, after, argument=place.argument, length=place.length)
    return whole.to(next(fitted.parameters()).device, aims[0].dtype).eval(), fit, outputs


def _map(
    place: Place, form: Form, aims: Sequence[Tensor], student: Sequence[Visit], rank: int
) -> tuple[nn.Module | None, BlockFit]:
    x = student[0].arguments.x
    stream = student[0].stream
    channel = place.structure.channel
    width = x.shape[channel]
    if x.numel() == aims[0].numel():  # the sum may be of another view
        aims = [aim.reshape(visit.kept.x.shape) for aim, visit in zip(aims, student, strict=True)]
    else:
        raise ReplearnError(
            f"{place.name} turns {tuple(x.shape)} into {tuple(aims[0].shape)}; only blocks that keep the shape "
            "can go."
        )
    low = low_rank(form, width, rank)
    image = channel == 1 and x.dim() == 4
    fitted = empty_map(place, form, x, rank)
    if form == "channels":
        layer: nn.Module = nn.Conv1d(width, width, 1, groups=width, device="meta")
    elif image:
        kernel = kernel_of(place.block, width)
        layer = nn.Conv2d(width, width, kernel, padding=kernel // 2, device="meta")
    else:
        layer = nn.Linear(width, width, device="meta")
    moments = Moments(), Moments()
    share = share_of_rows(layer, stream.load(aims[0]), aims) if form != "channels" else 1.0
    for visit, aim in zip(student, aims, strict=True):
        given = stream.load(visit.kept.x)
        wanted = stream.load(aim) - given
        if form == "channels" or not image:
            given, wanted = (t.movedim(channel, -1).reshape(-1, width) for t in (given, wanted))
        if form == "channels":
            given, wanted = (t.mT[None] for t in (given, wanted))
        for a, b in rows(layer, given, wanted, share):
            moments[visit.held_out].add(a, b)
    removal = max(float(moments[1].power.sum()), 1e-30)
    if not moments[0].finite() or not moments[1].finite():
        raise ReplearnError(f"The activations at {place.name} hold NaN or infinity: look at the weights.")
    mean = moments[0].mean_x
    base = torch.zeros(*moments[0].mean_y.shape, mean.shape[-1], dtype=mean.dtype, device=mean.device)
    found = solve(moments[0], moments[1], base, rank=low)
    if not found.error < removal:
        return None, BlockFit(place.name, "removal", 1.0, 1.0, 0.0)
    fitted.to(x.device)
    _write(fitted, found, moments[0], place)
    return fitted, BlockFit(place.name, form, found.error / removal, 1.0, found.ridge)


def low_rank(form: Form, width: int, rank: int) -> int | None:
    return min(rank, width // 2) if form == "low-rank" and width > 2 else None


def empty_map(place: Place, form: Form, x: Tensor, rank: int) -> nn.Module:
    """A map of this form before it is fitted."""
    channel = place.structure.channel
    width = x.shape[channel]
    if form == "channels":
        return Channels(width, channel, x.dim())
    low = low_rank(form, width, rank)
    with PrivateRandom():  # torch starts layers at random
        if channel == 1 and x.dim() == 4:
            return image_map(width, kernel_of(place.block, width), low)
        made = token_map(width, low)
    return made if channel == x.dim() - 1 else OnLast(made, channel)


@torch.no_grad()
def _write(fitted: Any, found: Solution, moments: Moments, place: Place) -> None:
    if isinstance(fitted, Channels):
        fitted.scale.copy_(found.weight.reshape(fitted.scale.shape))
        fitted.shift.copy_(found.shift.reshape(fitted.shift.shape))
        return
    if isinstance(fitted, OnLast):
        fitted = fitted.map
    if isinstance(fitted, nn.Linear):
        write_(fitted, None, found, moments)
        return
    if found.factors is None:
        conv = fitted[0]
        start = nn.functional.normalize(conv.weight.flatten(1)) * row_norm(place.block)
        conv.weight.copy_(start.view(conv.weight.shape))
        write_(conv, fitted[1], found, moments)
        return
    left, right = found.factors
    set_matrix_(fitted[0], right)
    if isinstance(fitted[1], nn.Linear):
        set_matrix_(fitted[1], left)
        fitted[1].bias.copy_(found.shift.flatten())
        return
    unit, gain = in_old_norms(nn.functional.normalize(torch.ones_like(left), dim=-1), left)
    set_matrix_(fitted[1], unit)
    mean, var = statistics(unit @ right, moments)
    norm = fitted[2]
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)
    norm.weight.copy_(gain.flatten() * (var + norm.eps).sqrt())
    norm.bias.copy_(found.shift.flatten() + gain.flatten() * mean)


def row_norm(block: nn.Module) -> float:
    """The usual length of a row in the block's last convolution; 1 where it has none."""
    convs = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
    return float(convs[-1].weight.detach().flatten(1).norm(dim=1).mean()) or 1.0 if convs else 1.0


def kernel_of(block: nn.Module, width: int) -> int:
    """3 where the block has wider convolutions than 1x1, and a 3x3 map is smaller than the block; else 1."""
    wide = any(isinstance(m, nn.Conv2d) and max(m.kernel_size) > 1 for m in block.modules())
    return 3 if wide and 9 * width**2 <= sum(p.numel() for p in block.parameters()) else 1


def map_inputs(block: nn.Module, structure: Structure, x: Tensor) -> int:
    """The number of inputs of one output of a full map in the block's place."""
    width = x.shape[structure.channel]
    image = structure.channel == 1 and x.dim() == 4
    return int(width * kernel_of(block, width) ** 2) if image else int(width)


def _half(
    place: Place, form: Form, teacher: nn.Module, taught: Sequence[Visit], student: Sequence[Visit]
) -> tuple[nn.Module, BlockFit, list[Tensor]] | None:
    structure = place.structure
    paths: dict[str, str] = {}
    if form == "mlp":
        found = mlp_half(place.block, structure, argument=place.argument, length=place.length)
        half: nn.Module | None = found[0] if found else None
        paths = found[1] if found else {}
    else:
        half = attention_half(place.block, structure, student[0].arguments)
    if half is None:
        return None
    half.eval()
    mine = understand(half, student[0].arguments)
    aims = aims_of(structure)
    last = Tap(structure.sums[-1].key)
    wanted = {
        layer.path: last if layer.sum is not None else aims[origin(layer.path, paths)]
        for layer in mine.layers
        if origin(layer.path, paths) in aims
    }
    outputs, values = teacher_values(teacher, taught, [*wanted.values(), last])
    fits = realign_block_(half, mine, student, wanted, values, place.name)
    error = fits[-1].after if fits else 1.0
    return half, BlockFit(place.name, form, error, 1.0, fits[-1].ridge if fits else 0.0, tuple(fits)), outputs
