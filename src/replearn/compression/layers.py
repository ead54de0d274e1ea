"""The door `realign`: solve linear layers of kept blocks again, towards what the untouched network has there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..operators._base.ridge import Moments, Solution, solve
from .calls import Tap, tapped
from .rows import matrix, rows, set_matrix_, share_of_rows
from .structure import Layer, Structure
from .walking import Visit


@dataclass(frozen=True, slots=True)
class LayerFit:
    """What became of one layer: its error on held-out rows before and after, as shares of the aim's power."""

    name: str
    before: float
    after: float
    ridge: float
    touched: bool
    thinned: bool = False  # solved on a part of the rows


def student_taps(layer: Layer) -> list[Tap]:
    own = [Tap(layer.key, layer.place)]
    return own if layer.sum is None or layer.beside_input else [*own, Tap(layer.sum, layer.other)]


def layer_moments(
    block: nn.Module, layer: Layer, visits: Sequence[Visit], aims: Sequence[Tensor]
) -> tuple[Moments, Moments]:
    """Moments of the layer's input in the student and what it should give: for fitting, and held-out ones."""
    module = block.get_submodule(layer.path)
    fitted, held = Moments(), Moments()
    taps = student_taps(layer)
    share = share_of_rows(module, visits[0].stream.load(aims[0]), [visit.kept.x for visit in visits])
    for visit, aim in zip(visits, aims, strict=True):
        arguments = visit.arguments
        _, found = tapped(block, arguments, taps, to_the_end=False)
        aim, tokens = aim.to(found[taps[0]].device), visit.tokens
        if layer.sum is not None:
            other = arguments.x if layer.beside_input else found[taps[1]]
            aim = aim.reshape(other.shape) - other  # a half block may have left out a view
            aim = in_layout(aim, layer)
            if tokens is not None and aim.dim() == 3:
                tokens = in_layout(tokens[..., None], layer)[..., 0]
            if layer.scale:
                aim = aim / divisor(block, layer)
        for x, y in rows(module, found[taps[0]], aim, share, tokens):
            (held if visit.held_out else fitted).add(x, y)
    fitted.thinned = share < 1
    return fitted, held


def in_layout(value: Tensor, layer: Layer) -> Tensor:
    """A value at the sum, in the layout in which the layer gives its own."""
    return value.permute(*(layer.order.index(i) for i in range(len(layer.order)))) if layer.order else value


def divisor(block: nn.Module, layer: Layer) -> Tensor:
    """The scale behind a layer, one number or one for each feature, in the layout of the layer's output."""
    path, _, name = layer.scale.rpartition(".")
    value: Tensor = getattr(block.get_submodule(path), name).detach().flatten()
    module = block.get_submodule(layer.path)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        value = value.view(-1, *[1] * (module.weight.dim() - 2))
    return torch.where(value.abs() < 1e-8, torch.ones_like(value), value)


@torch.no_grad()
def solve_layer_(block: nn.Module, layer: Layer, fitted: Moments, held: Moments, name: str) -> LayerFit:
    """Write the weights in that do best on held-out rows: those that are there, BatchNorm anew, or solved ones."""
    module = block.get_submodule(layer.path)
    norm: Any = block.get_submodule(layer.norm) if layer.norm else None
    power = max(float(held.power.sum()), 1e-30)
    if not fitted.finite() or not held.finite():
        return LayerFit(name, 1.0, 1.0, 0.0, False)
    weight = matrix(module)
    bias = getattr(module, "bias", None)
    shift = weight.new_zeros(weight.shape[:2]) if bias is None else bias.double().view(weight.shape[:2])
    if norm is None:
        base = weight
        before = fresh = held.error(weight, shift)
    else:
        before = held.error(*normed(norm, weight, shift, norm.running_mean, norm.running_var))
        base, anew = normed(norm, weight, torch.zeros_like(shift), *fitted.output_statistics(weight))
        fresh = held.error(base, anew)
    free = norm is not None or bias is not None
    found: Solution = solve(fitted, held, base, shifted=free)
    if found.error < min(before, fresh):
        write_(module, norm, found, fitted)
        return LayerFit(name, before / power, found.error / power, found.ridge, True, fitted.thinned)
    if fresh < before:
        set_statistics_(norm, weight, fitted)
        return LayerFit(name, before / power, fresh / power, 0.0, True)
    return LayerFit(name, before / power, before / power, 0.0, False)


def normed(norm: Any, weight: Tensor, shift: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """The map of a layer and the BatchNorm behind it with these statistics: weights (G, R, K) and shift (G, R)."""
    mean, var = (tensor.double().view(shift.shape) for tensor in (mean, var))
    gain = (1.0 if norm.weight is None else norm.weight.double().view(shift.shape)) / (var + norm.eps).sqrt()
    offset = 0.0 if norm.bias is None else norm.bias.double().view(shift.shape)
    return weight * gain[..., None], (shift - mean) * gain + offset


def set_statistics_(norm: Any, weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """Give a BatchNorm the mean and variance of what the weights make of these rows."""
    mean, var = (tensor.flatten() for tensor in moments.output_statistics(weight))
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)
    return mean, var


def set_norm_(norm: Any, weight: Tensor, gain: Tensor, shift: Tensor, moments: Moments) -> None:
    """Set a BatchNorm so that it makes gain (W x) + shift of what these weights make of x."""
    mean, var = set_statistics_(norm, weight, moments)
    norm.weight.copy_(gain.flatten() * (var + norm.eps).sqrt())
    norm.bias.copy_(shift.flatten() + gain.flatten() * mean)


def write_(module: nn.Module, norm: Any, found: Solution, moments: Moments) -> None:
    """Put a solution into a layer; before a BatchNorm its rows keep their norms, and the scale goes there."""
    weight, bias = found.weight, getattr(module, "bias", None)
    if norm is not None and norm.weight is not None:
        weight, gain = in_old_norms(matrix(module), weight)
        set_norm_(norm, weight, gain, found.shift, moments)
    elif norm is not None:  # its statistics carry the shift
        norm.running_mean.copy_(-found.shift.flatten())
        norm.running_var.fill_(1 - norm.eps)
    set_matrix_(module, weight)
    if bias is not None:
        bias.copy_(found.shift.flatten() if norm is None else torch.zeros_like(bias))


def in_old_norms(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The new rows at the old ones' lengths, and the factors that make up for it."""
    lengths = new.norm(dim=-1)
    kept = old.norm(dim=-1)
    kept = torch.where(kept > 0, kept, torch.ones_like(kept))
    silent = lengths <= 1e-12 * kept
    gain = torch.where(silent, torch.zeros_like(lengths), lengths / kept)
    safe = torch.where(silent, torch.ones_like(lengths), lengths)
    rows_ = torch.where(silent[..., None], old, new * (kept / safe)[..., None])
    return rows_, gain


def teacher_values(
    block: nn.Module, visits: Sequence[Visit], taps: Sequence[Tap]
) -> tuple[list[Tensor], list[dict[Tap, Tensor]]]:
    """The outputs of an untouched block and its values at the taps, batch by batch."""
    outputs, values = [], []
    for visit in visits:
        made, found = tapped(block, visit.arguments, taps)
        if made is None:
            raise RuntimeError("the block ended before its output")
        outputs.append(visit.stream.keep(made))
        values.append({tap: visit.stream.keep(value) for tap, value in found.items()})
    return outputs, values


def realign_block_(
    block: nn.Module,
    structure: Structure,
    student: Sequence[Visit],
    aims: Mapping[str, Tap],
    values: Sequence[Mapping[Tap, Tensor]],
    name: str,
) -> list[LayerFit]:
    """Solve a block's layers one after another; `aims` says where the teacher has what each layer should give."""
    fits = []
    for layer in structure.layers:
        if layer.path not in aims:
            continue
        tap = aims[layer.path]
        fitted, held = layer_moments(block, layer, student, [found[tap] for found in values])
        fits.append(solve_layer_(block, layer, fitted, held, f"{name}.{layer.path}"))
    return fits


def aims_of(structure: Structure) -> dict[str, Tap]:
    """Where the untouched network has what layers should give, but those that only say where attention looks."""
    layers = [layer for layer in structure.layers if not layer.feeds_attention]
    return {layer.path: Tap(layer.sum or layer.norm_key or layer.key) for layer in layers}
