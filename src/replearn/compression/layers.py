"""The door `realign`: solve linear layers of kept blocks again, towards what the untouched network has there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def aim_tap(layer: Layer) -> Tap:
    """Where the untouched network has what the layer should give."""
    return Tap(layer.sum or layer.norm_key or layer.key)


def student_taps(layer: Layer) -> list[Tap]:
    own = [Tap(layer.key, layer.place)]
    return own if layer.sum is None or layer.beside_input else [*own, Tap(layer.sum, layer.other)]


def layer_moments(
    block: nn.Module, layer: Layer, visits: Sequence[Visit], aims: Callable[[int], Tensor]
) -> tuple[Moments, Moments]:
    """Moments of the layer's input in the student and what it should give: for fitting, and held-out ones."""
    module = block.get_submodule(layer.path)
    fitted, held = Moments(), Moments()
    taps = student_taps(layer)
    share = share_of_rows(module, visits[0].stream.load(aims(0)), [visit.kept.x for visit in visits])
    for number, visit in enumerate(visits):
        arguments = visit.arguments
        _, found = tapped(block, arguments, taps, to_the_end=False)
        aim = aims(number).to(found[taps[0]].device)
        if layer.sum is not None:
            other = arguments.x if layer.beside_input else found[taps[1]]
            aim = aim.reshape(other.shape) - other  # a half block may have left out a view
            aim = in_layout(aim, layer)
            if layer.scale:
                aim = aim / divisor(block, layer)
        for x, y in rows(module, found[taps[0]], aim, share):
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
    now, shift = effective(module, norm, weight)
    before = held.error(now, shift)
    base = now
    fresh = before
    if norm is not None and norm.running_mean is not None:
        base, anew = normed(norm, weight, fitted)
        fresh = held.error(base, anew)
    free = norm is not None or getattr(module, "bias", None) is not None
    found: Solution = solve(fitted, held, base, shifted=free)
    if found.error < min(before, fresh):
        write_(module, norm, found, fitted)
        return LayerFit(name, before / power, found.error / power, found.ridge, True, fitted.thinned)
    if fresh < before:
        mean, var = statistics(weight, fitted)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
        return LayerFit(name, before / power, fresh / power, 0.0, True)
    return LayerFit(name, before / power, before / power, 0.0, False)


def effective(module: nn.Module, norm: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The map of a layer and the BatchNorm behind it: weights (G, R, K) and shift (G, R)."""
    shape = weight.shape[:2]
    bias = getattr(module, "bias", None)
    shift = weight.new_zeros(shape) if bias is None else bias.detach().double().view(shape)
    if norm is None:
        return weight, shift
    gain, offset = affine(norm, shape)
    mean, var = norm.running_mean.double().view(shape), norm.running_var.double().view(shape)
    gain = gain / (var + norm.eps).sqrt()
    return weight * gain[..., None], (shift - mean) * gain + offset


def affine(norm: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
    device = norm.running_mean.device
    one = torch.ones(shape, dtype=torch.float64, device=device)
    if norm.weight is None:
        return one, torch.zeros_like(one)
    return norm.weight.detach().double().view(shape), norm.bias.detach().double().view(shape)


def normed(norm: Any, weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """The same, with BatchNorm's statistics measured anew on these rows."""
    shape = weight.shape[:2]
    mean, var = (tensor.view(shape) for tensor in statistics(weight, moments))
    gain, offset = affine(norm, shape)
    gain = gain / (var + norm.eps).sqrt()
    return weight * gain[..., None], offset - mean * gain


def statistics(weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """Mean and variance of what the weights make of these rows."""
    mean, var = moments.spread(weight)
    return mean.flatten(), var.flatten()


def write_(module: nn.Module, norm: Any, found: Solution, moments: Moments) -> None:
    """Put a solution into a layer; before a BatchNorm its rows keep their norms, and the scale goes there."""
    bias = getattr(module, "bias", None)
    if norm is None or norm.weight is None or norm.running_mean is None:
        gain, shift = None, found.shift
        weight = found.weight
        if norm is not None:  # a norm without weights: its statistics carry the shift
            norm.running_mean.copy_(-found.shift.flatten())
            norm.running_var.fill_(1 - norm.eps)
            shift = torch.zeros_like(found.shift)
    else:
        weight, gain = in_old_norms(matrix(module), found.weight)
        shift = torch.zeros_like(found.shift)
    set_matrix_(module, weight)
    if bias is not None:
        bias.copy_(shift.flatten())
    if gain is not None:
        mean, var = statistics(weight, moments)
        slope = gain.flatten() * (var + norm.eps).sqrt()
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
        norm.weight.copy_(slope)
        norm.bias.copy_(found.shift.flatten() + gain.flatten() * mean)


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


def aligned_layers(structure: Structure) -> list[Layer]:
    """The layers that are solved again: all but those that only say where attention looks."""
    return [layer for layer in structure.layers if not layer.feeds_attention]


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
    for layer in aligned_layers(structure):
        if layer.path not in aims:
            continue
        tap = aims[layer.path]
        fitted, held = layer_moments(block, layer, student, lambda number, tap=tap: values[number][tap])  # type: ignore[misc]
        fits.append(solve_layer_(block, layer, fitted, held, f"{name}.{layer.path}"))
    return fits


def aims_of(structure: Structure) -> dict[str, Tap]:
    return {layer.path: aim_tap(layer) for layer in aligned_layers(structure)}
