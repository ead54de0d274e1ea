"""Realign kept blocks: fit their linear layers to the teacher's activations by least squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..operators._base.ridge import Moments, Solution, solve
from .activations import ValueKey, run_and_record
from .blockwise import Calls
from .regression_rows import layer_rows, row_fraction, set_weight_matrix_, weight_matrix
from .structure import Layer, Structure


@dataclass(frozen=True, slots=True)
class LayerFit:
    """The fit of one layer: held-out errors before and after, relative to the target's power."""

    name: str
    before: float
    after: float
    ridge: float
    touched: bool
    thinned: bool = False  # fitted on a part of the rows


def layer_moments(
    block: nn.Module, layer: Layer, calls: Calls, targets: Sequence[Tensor]
) -> tuple[Moments, Moments]:
    """Moments of the layer's inputs in the student and its target outputs: for fitting, and held-out ones."""
    module = block.get_submodule(layer.path)
    fitting, held_out = Moments(), Moments()
    keys = [ValueKey(layer.key, layer.arg)]
    if layer.sum is not None and not layer.adds_input:
        keys.append(ValueKey(layer.sum, layer.other_arg))
    share = row_fraction(module, calls[0].offloader.load(targets[0]), [call.saved.x for call in calls])
    for call, target in zip(calls, targets, strict=True):
        arguments = call.arguments
        _, values = run_and_record(block, arguments, keys, stop_early=True)
        target, tokens = target.to(values[keys[0]].device), call.tokens
        if layer.sum is not None:
            other = arguments.x if layer.adds_input else values[keys[1]]
            target = target.reshape(other.shape) - other  # half of a block may lack a view
            target = to_layer_layout(target, layer)
            if tokens is not None and target.dim() == 3:
                tokens = to_layer_layout(tokens[..., None], layer)[..., 0]
            if layer.scale:
                target = target / scale_of(block, layer)
        for x, y in layer_rows(module, values[keys[0]], target, share, tokens):
            (held_out if call.held_out else fitting).add(x, y)
    fitting.thinned = share < 1
    return fitting, held_out


def to_layer_layout(value: Tensor, layer: Layer) -> Tensor:
    """A value at the residual sum, permuted to the layout of the layer's output."""
    return value.permute(*(layer.order.index(i) for i in range(len(layer.order)))) if layer.order else value


def scale_of(block: nn.Module, layer: Layer) -> Tensor:
    """The scale after a layer, for all channels or each, in the layout of the layer's output."""
    path, _, name = layer.scale.rpartition(".")
    value: Tensor = getattr(block.get_submodule(path), name).detach().flatten()
    module = block.get_submodule(layer.path)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        value = value.view(-1, *[1] * (module.weight.dim() - 2))
    return torch.where(value.abs() < 1e-8, torch.ones_like(value), value)


@torch.no_grad()
def solve_layer_(block: nn.Module, layer: Layer, fitting: Moments, held_out: Moments, name: str) -> LayerFit:
    """Keep the weights, renew BatchNorm statistics, or write the fit: the least held-out error wins."""
    module = block.get_submodule(layer.path)
    norm: Any = block.get_submodule(layer.norm) if layer.norm else None
    power = max(float(held_out.power.sum()), 1e-30)
    if not fitting.finite() or not held_out.finite():
        return LayerFit(name, 1.0, 1.0, 0.0, False)
    weight = weight_matrix(module)
    bias = getattr(module, "bias", None)
    shift = weight.new_zeros(weight.shape[:2]) if bias is None else bias.double().view(weight.shape[:2])
    if norm is None:
        base = weight
        before = renormed = held_out.error(weight, shift)
    else:
        before = held_out.error(*folded_norm(norm, weight, shift, norm.running_mean, norm.running_var))
        base, new_shift = folded_norm(norm, weight, torch.zeros_like(shift), *fitting.output_statistics(weight))
        renormed = held_out.error(base, new_shift)
    solution: Solution = solve(fitting, held_out, base, shifted=norm is not None or bias is not None)
    if solution.error < min(before, renormed):
        write_solution_(module, norm, solution, fitting)
        return LayerFit(name, before / power, solution.error / power, solution.ridge, True, fitting.thinned)
    if renormed < before:
        set_statistics_(norm, weight, fitting)
        return LayerFit(name, before / power, renormed / power, 0.0, True)
    return LayerFit(name, before / power, before / power, 0.0, False)


def folded_norm(norm: Any, weight: Tensor, shift: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's map with the BatchNorm after it folded, for these statistics: weights (G, R, K), shift (G, R)."""
    mean, var = (tensor.double().view(shift.shape) for tensor in (mean, var))
    gain = (1.0 if norm.weight is None else norm.weight.double().view(shift.shape)) / (var + norm.eps).sqrt()
    offset = 0.0 if norm.bias is None else norm.bias.double().view(shift.shape)
    return weight * gain[..., None], (shift - mean) * gain + offset


def set_statistics_(norm: Any, weight: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """Set a BatchNorm's statistics to the mean and variance of the weights' outputs."""
    mean, var = (tensor.flatten() for tensor in moments.output_statistics(weight))
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)
    return mean, var


def set_norm_(norm: Any, weight: Tensor, gain: Tensor, shift: Tensor, moments: Moments) -> None:
    """Set a BatchNorm so that it maps W x to gain (W x) + shift."""
    mean, var = set_statistics_(norm, weight, moments)
    norm.weight.copy_(gain.flatten() * (var + norm.eps).sqrt())
    norm.bias.copy_(shift.flatten() + gain.flatten() * mean)


def write_solution_(module: nn.Module, norm: Any, solution: Solution, moments: Moments) -> None:
    """Write a solution into a layer; the rows keep their norms if a BatchNorm after it can take the scale."""
    weight, bias = solution.weight, getattr(module, "bias", None)
    if norm is not None and norm.weight is not None:
        weight, gain = with_row_norms(weight_matrix(module), weight)
        set_norm_(norm, weight, gain, solution.shift, moments)
    elif norm is not None:  # its statistics carry the shift
        norm.running_mean.copy_(-solution.shift.flatten())
        norm.running_var.fill_(1 - norm.eps)
    set_weight_matrix_(module, weight)
    if bias is not None:
        bias.copy_(solution.shift.flatten() if norm is None else torch.zeros_like(bias))


def with_row_norms(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The new rows scaled to the norms of the old ones, and the inverse factors."""
    new_norms = new.norm(dim=-1)
    row_norms = old.norm(dim=-1)
    row_norms = torch.where(row_norms > 0, row_norms, torch.ones_like(row_norms))
    is_zero = new_norms <= 1e-12 * row_norms
    gain = torch.where(is_zero, torch.zeros_like(new_norms), new_norms / row_norms)
    safe = torch.where(is_zero, torch.ones_like(new_norms), new_norms)
    scaled = torch.where(is_zero[..., None], old, new * (row_norms / safe)[..., None])
    return scaled, gain


def teacher_values(
    block: nn.Module, calls: Calls, keys: Sequence[ValueKey]
) -> tuple[list[Tensor], list[dict[ValueKey, Tensor]]]:
    """The outputs of a teacher's block and its values of these keys, batch by batch."""
    outputs, values = [], []
    for call in calls:
        output, found = run_and_record(block, call.arguments, keys)
        if output is None:
            raise RuntimeError("the block ended before its output")
        outputs.append(call.offloader.store(output))
        values.append({key: call.offloader.store(value) for key, value in found.items()})
    return outputs, values


def realign_block_(
    block: nn.Module,
    structure: Structure,
    calls: Calls,
    targets: Mapping[str, ValueKey],
    values: Sequence[Mapping[ValueKey, Tensor]],
    name: str,
) -> list[LayerFit]:
    """Fit a block's layers one after another; `targets` are the keys of each layer's target among the values."""
    fits = []
    for layer in structure.layers:
        if layer.path not in targets:
            continue
        key = targets[layer.path]
        fitting, held_out = layer_moments(block, layer, calls, [batch[key] for batch in values])
        fits.append(solve_layer_(block, layer, fitting, held_out, f"{name}.{layer.path}"))
    return fits


def target_keys(structure: Structure) -> dict[str, ValueKey]:
    """The teacher's values that layers are fitted to; none for layers that feed attention, as queries and keys."""
    layers = [layer for layer in structure.layers if not layer.feeds_attention]
    return {layer.path: ValueKey(layer.sum or layer.norm_key or layer.key) for layer in layers}
