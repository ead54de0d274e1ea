"""Fit what stands in one block's place, on the visits of a walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.running import PrivateRandom
from ..errors import ReplearnError
from ..fitting.observe import unpadded
from ..operators._base.ridge import Moments, Solution, solve
from .calls import Tap
from .corrections import (
    Form,
    after_of,
    as_called,
    channels,
    correction,
    half_of,
    image_map,
    on_last,
    origin,
    pass_through,
    token_map,
)
from .layers import aims_of, in_old_norms, realign_block_, set_norm_, teacher_values, write_
from .rows import rows, set_matrix_, share_of_rows
from .structure import Structure, understand
from .walking import Visit


@dataclass(frozen=True, slots=True)
class BlockFit:
    """What stands in a block's place; the error on held-out rows, as a share of that of removal."""

    name: str
    form: Form
    error: float = 1.0
    ridge: float = 0.0


@dataclass(frozen=True, eq=False)
class Place:
    """A block that goes: itself in the student, and its structure."""

    name: str
    block: nn.Module
    structure: Structure


def fit_block(
    place: Place, form: Form, teacher: nn.Module, taught: Sequence[Visit], student: Sequence[Visit], rank: int
) -> tuple[nn.Module, BlockFit, list[Tensor]]:
    """Fit one form; returns it, how well it does, and the outputs of the untouched block."""
    structure = place.structure
    if form in ("mlp", "attention"):
        made = _half(place, form, teacher, taught, student)
        if made is not None:
            return made
        form = "full"
    aim = None if structure.after is None else Tap(structure.sums[-1].key)
    outputs, values = teacher_values(teacher, taught, [aim] if aim else [])
    aims = [found[aim] for found in values] if aim else outputs
    found = None if form == "removal" else _solved(place, form, aims, student, rank)
    if found is None:
        return pass_through(structure), BlockFit(place.name, "removal"), outputs
    solution, moments, error = found
    whole = empty_correction(place, form, student[0].arguments.x, rank)
    _write(whole.branch, solution, moments, place)
    return as_called(whole, structure), BlockFit(place.name, form, error, solution.ridge), outputs


def _solved(
    place: Place, form: Form, aims: Sequence[Tensor], student: Sequence[Visit], rank: int
) -> tuple[Solution, Moments, float] | None:
    """The map from the student's input to the aims, its rows, and its error as a share of removal's.

    None where it is no better than that.
    """
    x, stream = student[0].arguments.x, student[0].stream
    channel, image = place.structure.channel, place.structure.image
    width = x.shape[channel]
    if x.numel() != aims[0].numel():
        raise ReplearnError(
            f"{place.name} turns {tuple(x.shape)} into {tuple(aims[0].shape)}; only blocks that keep the shape "
            "can go."
        )
    if form == "channels":
        layer: nn.Module = nn.Conv1d(width, width, 1, groups=width, device="meta")
    elif image:
        kernel = kernel_of(place.block, width)
        layer = nn.Conv2d(width, width, kernel, padding=kernel // 2, device="meta")
    else:
        layer = nn.Linear(width, width, device="meta")
    fitted, held = Moments(), Moments()
    share = share_of_rows(layer, stream.load(aims[0]), aims) if form != "channels" else 1.0
    for visit, aim in zip(student, aims, strict=True):
        given = stream.load(visit.kept.x)
        wanted = stream.load(aim).reshape(given.shape) - given  # the sum may be of another view
        if form == "channels" or not image:
            given, wanted = (t.movedim(channel, -1).reshape(-1, width) for t in (given, wanted))
            given, wanted = (unpadded(t, visit.tokens) for t in (given, wanted))
        if form == "channels":
            given, wanted = (t.mT[None] for t in (given, wanted))
        for a, b in rows(layer, given, wanted, share):
            (held if visit.held_out else fitted).add(a, b)
    if not fitted.finite() or not held.finite():
        raise ReplearnError(f"The activations at {place.name} hold NaN or infinity: look at the weights.")
    removal = max(float(held.power.sum()), 1e-30)
    mean = fitted.mean_x
    base = mean.new_zeros(*fitted.mean_y.shape, mean.shape[-1])
    found = solve(fitted, held, base, rank=low_rank(form, width, rank))
    return (found, fitted, found.error / removal) if found.error < removal else None


def low_rank(form: Form, width: int, rank: int) -> int | None:
    return min(rank, width // 2) if form == "low-rank" and width > 2 else None


def empty_correction(place: Place, form: Form, x: Tensor, rank: int) -> nn.Module:
    """A map of this form before it is fitted, with what follows the block's last sum."""
    channel = place.structure.channel
    width = x.shape[channel]
    low = low_rank(form, width, rank)
    with PrivateRandom():  # torch starts layers at random
        if form == "channels":
            made: nn.Module = channels(width, channel, x.dim())
        elif place.structure.image:
            made = image_map(width, kernel_of(place.block, width), low)
        else:
            made = token_map(width, low)
            made = made if channel == x.dim() - 1 else on_last(made, channel)
    dtype = next((p.dtype for p in place.block.parameters() if p.is_floating_point()), x.dtype)  # not autocast's
    return correction(made.to(x.device, dtype), after_of(place.block, place.structure)).eval()


@torch.no_grad()
def _write(fitted: Any, found: Solution, moments: Moments, place: Place) -> None:
    fitted = getattr(fitted, "map", fitted)
    if hasattr(fitted, "scale"):
        fitted.scale.copy_(found.weight.reshape(fitted.scale.shape))
        fitted.shift.copy_(found.shift.reshape(fitted.shift.shape))
    elif isinstance(fitted, nn.Linear):
        write_(fitted, None, found, moments)
    elif found.factors is None:
        conv = fitted[0]
        start = nn.functional.normalize(conv.weight.flatten(1)) * row_norm(place.block)
        conv.weight.copy_(start.view(conv.weight.shape))
        write_(conv, fitted[1], found, moments)
    else:
        left, right = found.factors
        set_matrix_(fitted[0], right)
        if isinstance(fitted[1], nn.Linear):
            set_matrix_(fitted[1], left)
            fitted[1].bias.copy_(found.shift.flatten())
            return
        unit, gain = in_old_norms(nn.functional.normalize(torch.ones_like(left), dim=-1), left)
        set_matrix_(fitted[1], unit)
        set_norm_(fitted[2], unit @ right, gain, found.shift, moments)


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
    return int(width * kernel_of(block, width) ** 2) if structure.image else int(width)


def _half(
    place: Place, form: Form, teacher: nn.Module, taught: Sequence[Visit], student: Sequence[Visit]
) -> tuple[nn.Module, BlockFit, list[Tensor]] | None:
    structure, arguments = place.structure, student[0].arguments
    found = half_of(form, place.block, structure, arguments)
    if found is None:
        return None
    half, paths = found
    mine, aims, last = understand(half, arguments), aims_of(structure), Tap(structure.sums[-1].key)
    wanted = {
        layer.path: last if layer.sum is not None else aims[origin(layer.path, paths)]
        for layer in mine.layers
        if origin(layer.path, paths) in aims
    }
    outputs, values = teacher_values(teacher, taught, [*wanted.values(), last])
    fits = realign_block_(half, mine, student, wanted, values, place.name)
    fit = BlockFit(place.name, form, fits[-1].after, fits[-1].ridge) if fits else BlockFit(place.name, form)
    return half, fit, outputs
