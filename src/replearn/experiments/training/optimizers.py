"""A recipe's optimizer, with the coefficients' weight decay left out, and its learning rate at each step."""

import math
from typing import Any

import torch
from torch import nn

from ...errors import ReplearnError
from ...surgery.replace import param_groups
from .recipe import Optimizer, Schedule


def make_optimizer(model: nn.Module, recipe: Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Build the optimizer; on a GPU it is fused and its rate is a tensor, so that steps can be captured."""
    groups = param_groups(model, recipe.weight_decay)
    if not recipe.decay_vectors:
        decayed, free = groups
        free["params"] = [*free["params"], *(each for each in decayed["params"] if each.dim() <= 1)]
        decayed["params"] = [each for each in decayed["params"] if each.dim() > 1]
    groups = [group for group in groups if group["params"]]
    on_gpu = device.type == "cuda"
    rate: Any = torch.tensor(recipe.lr, device=device) if on_gpu else recipe.lr
    if recipe.name == "sgd":
        nesterov = recipe.nesterov and recipe.momentum > 0
        made = torch.optim.SGD(groups, lr=rate, momentum=recipe.momentum, nesterov=nesterov, fused=on_gpu)
        if on_gpu and recipe.momentum > 0:  # the fused step fails where a parameter has its first gradient later
            for parameter in (each for group in made.param_groups for each in group["params"]):
                made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return made
    if recipe.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if recipe.name == "adamw" else torch.optim.Adam
        return kind(groups, lr=rate, betas=recipe.betas, fused=on_gpu, capturable=on_gpu)
    raise ReplearnError(f"There is no optimizer {recipe.name!r}; write sgd, adamw or adam.")


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rate_at(schedule: Schedule, step: int, steps: int, steps_per_epoch: int) -> float:
    """The learning rate at a step, as a share of the peak.

    Warm-up rises linearly from 1/n to 1 over its n steps; the rest of the run follows the curve.

    >>> rate_at(Schedule(warmup_epochs=1), step=0, steps=100, steps_per_epoch=10)
    0.1
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if schedule.name == "poly":
        return float((1 - progress) ** schedule.power)
    raise ReplearnError(f"There is no schedule {schedule.name!r}; write cosine, constant or poly.")
