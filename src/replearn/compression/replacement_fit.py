"""Fit the replacement of one block in closed form."""

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
from .activations import ValueKey
from .blockwise import Calls
from .forms import (
    Form,
    channel_affine,
    correction,
    half_block,
    identity_for,
    image_map,
    layers_after,
    on_last_dim,
    original_path,
    token_map,
    with_signature,
)
from .realign import realign_block_, set_norm_, target_keys, teacher_values, with_row_norms, write_solution_
from .regression_rows import layer_rows, row_fraction, set_weight_matrix_
from .structure import Structure, read_structure


@dataclass(frozen=True, slots=True)
class BlockFit:
    """What replaces a block; the error on held-out rows, relative to that of removal."""

    name: str
    form: Form
    error: float = 1.0
    ridge: float = 0.0


@dataclass(frozen=True, eq=False)
class ReplacedBlock:
    """A block of the student that is to be replaced."""

    name: str
    block: nn.Module
    structure: Structure


def fit_block(
    replaced: ReplacedBlock, form: Form, teacher: nn.Module, teacher_calls: Calls, student_calls: Calls, rank: int
) -> tuple[nn.Module, BlockFit, list[Tensor]]:
    """Fit one form; returns the replacement, its errors, and the outputs of the teacher's block."""
    structure = replaced.structure
    if form in ("mlp", "attention"):
        fitted = _fit_half(replaced, form, teacher, teacher_calls, student_calls)
        if fitted is not None:
            return fitted
        form = "full"
    key = None if structure.after is None else ValueKey(structure.sums[-1].key)
    outputs, values = teacher_values(teacher, teacher_calls, [key] if key else [])
    targets = [batch[key] for batch in values] if key else outputs
    found = None if form == "removal" else _solve_map(replaced, form, targets, student_calls, rank)
    if found is None:
        return identity_for(structure), BlockFit(replaced.name, "removal"), outputs
    solution, moments, error = found
    module = unfitted_correction(replaced, form, student_calls[0].arguments.x, rank)
    _write_map(module.branch, solution, moments, replaced)
    return with_signature(module, structure), BlockFit(replaced.name, form, error, solution.ridge), outputs


def _solve_map(
    replaced: ReplacedBlock, form: Form, targets: Sequence[Tensor], student_calls: Calls, rank: int
) -> tuple[Solution, Moments, float] | None:
    """The map from the student's inputs to the targets, its moments, and its error relative to removal's.

    None if the error is not below removal's.
    """
    x, offloader = student_calls[0].arguments.x, student_calls[0].offloader
    channel, image = replaced.structure.channel, replaced.structure.image
    width = x.shape[channel]
    if x.numel() != targets[0].numel():
        raise ReplearnError(
            f"{replaced.name} turns {tuple(x.shape)} into {tuple(targets[0].shape)}; only blocks that keep the "
            "shape can go."
        )
    if form == "channels":
        layer: nn.Module = nn.Conv1d(width, width, 1, groups=width, device="meta")
    elif image:
        kernel = kernel_of(replaced.block, width)
        layer = nn.Conv2d(width, width, kernel, padding=kernel // 2, device="meta")
    else:
        layer = nn.Linear(width, width, device="meta")
    fitting, held_out = Moments(), Moments()
    share = row_fraction(layer, offloader.load(targets[0]), targets) if form != "channels" else 1.0
    for call, target in zip(student_calls, targets, strict=True):
        x = offloader.load(call.saved.x)
        residual = offloader.load(target).reshape(x.shape) - x  # the sum may have another shape
        if form == "channels" or not image:
            x, residual = (t.movedim(channel, -1).reshape(-1, width) for t in (x, residual))
            x, residual = (unpadded(t, call.tokens) for t in (x, residual))
        if form == "channels":
            x, residual = (t.mT[None] for t in (x, residual))
        for a, b in layer_rows(layer, x, residual, share):
            (held_out if call.held_out else fitting).add(a, b)
    if not fitting.finite() or not held_out.finite():
        raise ReplearnError(f"The activations at {replaced.name} hold NaN or infinity: look at the weights.")
    removal = max(float(held_out.power.sum()), 1e-30)
    mean = fitting.mean_x
    base = mean.new_zeros(*fitting.mean_y.shape, mean.shape[-1])
    solution = solve(fitting, held_out, base, rank=effective_rank(form, width, rank))
    return (solution, fitting, solution.error / removal) if solution.error < removal else None


def effective_rank(form: Form, width: int, rank: int) -> int | None:
    return min(rank, width // 2) if form == "low-rank" and width > 2 else None


def unfitted_correction(replaced: ReplacedBlock, form: Form, x: Tensor, rank: int) -> nn.Module:
    """An unfitted correction of this form, with the layers after the block's last sum."""
    channel = replaced.structure.channel
    width = x.shape[channel]
    low = effective_rank(form, width, rank)
    with PrivateRandom():  # layers are initialised at random
        if form == "channels":
            linear_map: nn.Module = channel_affine(width, channel, x.dim())
        elif replaced.structure.image:
            linear_map = image_map(width, kernel_of(replaced.block, width), low)
        else:
            linear_map = token_map(width, low)
            linear_map = linear_map if channel == x.dim() - 1 else on_last_dim(linear_map, channel)
    dtype = next(
        (p.dtype for p in replaced.block.parameters() if p.is_floating_point()), x.dtype
    )  # not x's, under autocast
    return correction(linear_map.to(x.device, dtype), layers_after(replaced.block, replaced.structure)).eval()


@torch.no_grad()
def _write_map(module: Any, solution: Solution, moments: Moments, replaced: ReplacedBlock) -> None:
    module = getattr(module, "map", module)
    if hasattr(module, "scale"):
        module.scale.copy_(solution.weight.reshape(module.scale.shape))
        module.shift.copy_(solution.shift.reshape(module.shift.shape))
    elif isinstance(module, nn.Linear):
        write_solution_(module, None, solution, moments)
    elif solution.factors is None:
        conv = module[0]
        start = nn.functional.normalize(conv.weight.flatten(1)) * mean_row_norm(replaced.block)
        conv.weight.copy_(start.view(conv.weight.shape))
        write_solution_(conv, module[1], solution, moments)
    else:
        left, right = solution.factors
        set_weight_matrix_(module[0], right)
        if isinstance(module[1], nn.Linear):
            set_weight_matrix_(module[1], left)
            module[1].bias.copy_(solution.shift.flatten())
            return
        unit, gain = with_row_norms(nn.functional.normalize(torch.ones_like(left), dim=-1), left)
        set_weight_matrix_(module[1], unit)
        set_norm_(module[2], unit @ right, gain, solution.shift, moments)


def mean_row_norm(block: nn.Module) -> float:
    """The mean norm of the rows of the block's last convolution; 1 without one."""
    convs = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
    return float(convs[-1].weight.detach().flatten(1).norm(dim=1).mean()) or 1.0 if convs else 1.0


def kernel_of(block: nn.Module, width: int) -> int:
    """3 if the block has convolutions wider than 1x1 and at least as many parameters as a 3x3 map; else 1."""
    wide = any(isinstance(m, nn.Conv2d) and max(m.kernel_size) > 1 for m in block.modules())
    return 3 if wide and 9 * width**2 <= sum(p.numel() for p in block.parameters()) else 1


def num_map_inputs(block: nn.Module, structure: Structure, x: Tensor) -> int:
    """The number of inputs that each output of a full map reads."""
    width = x.shape[structure.channel]
    return int(width * kernel_of(block, width) ** 2) if structure.image else int(width)


def _fit_half(
    replaced: ReplacedBlock, form: Form, teacher: nn.Module, teacher_calls: Calls, student_calls: Calls
) -> tuple[nn.Module, BlockFit, list[Tensor]] | None:
    """Fit one half of a transformer block; None where the block has no such half."""
    structure, arguments = replaced.structure, student_calls[0].arguments
    found = half_block(form, replaced.block, structure, arguments)
    if found is None:
        return None
    half, paths = found
    half_structure, keys = read_structure(half, arguments), target_keys(structure)
    last = ValueKey(structure.sums[-1].key)
    targets = {
        layer.path: last if layer.sum is not None else keys[original_path(layer.path, paths)]
        for layer in half_structure.layers
        if original_path(layer.path, paths) in keys
    }
    outputs, values = teacher_values(teacher, teacher_calls, [*targets.values(), last])
    fits = realign_block_(half, half_structure, student_calls, targets, values, replaced.name)
    fit = BlockFit(replaced.name, form, fits[-1].after, fits[-1].ridge) if fits else BlockFit(replaced.name, form)
    return half, fit, outputs
