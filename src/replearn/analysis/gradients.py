"""Gradient bias on the parameters that the full and the replaced model share, next to its bound."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..blocks.running import differentiable_attention
from ..operators._base.options import ReadingOptions
from ..planning.targets import build_operator
from ..surgery.replace import device_of, set_submodule
from .results import Bias, GradientBias
from .subject import Subject
from .suffix import BATCH, SETTLED

Gradients = dict[str, Tensor]


def gradient_bias(subject: Subject, output_bound: float, *, iterations: int, seed: int) -> GradientBias:
    """Both gradients of the mean loss of one held-out batch, in eval mode, and B_grad for it.

    The paper's sum bounds the deviation of one sample; over a batch of B samples deviations add up to
    sqrt(B) times that, which is what the sensitivity of the batch's gradient is multiplied with.
    """
    names, sources = shared_parameters(subject)
    full, away = [copy.deepcopy(subject.full).requires_grad_(True) for _ in range(2)]
    for target in subject.plan.targets:  # the same operators, reading sources that gradients flow to
        flowing = target
        if isinstance(target.operator, ReadingOptions):
            flowing = replace(target, operator=replace(target.operator, stop_gradient=False))
        operator = build_operator(away, flowing, device_of(away, target)).eval()
        operator.load_state_dict(subject.replaced.get_submodule(target.name).state_dict())
        set_submodule(away, target.name, operator)
    stopped = copy.deepcopy(subject.replaced).requires_grad_(True)
    true, loss, z = gradients(subject, full, names)
    held, loss_replaced, moved = gradients(subject, stopped, names)
    free, _, _ = gradients(subject, away, names)
    pulled = through_output(subject, full, names, moved)
    sensitivity = gradient_sensitivity(subject, full, names, iterations=iterations, seed=seed)
    return GradientBias(
        stopped=bias(true, held, pulled, names),
        flowing=bias(true, free, pulled, names),
        sources_stopped=bias(true, held, pulled, sources),
        sources_flowing=bias(true, free, pulled, sources),
        sensitivity=sensitivity,
        bound=sensitivity * len(z) ** 0.5 * output_bound,
        measured_bound=sensitivity * float((moved - z).double().norm()),
        loss=loss,
        loss_replaced=loss_replaced,
        labels=subject.labels,
    )


def shared_parameters(subject: Subject) -> tuple[list[str], list[str]]:
    """The names of all kept parameters, and of those in blocks that operators read."""
    gone = tuple(f"{target.name}." for target in subject.plan.targets)
    names = [name for name, _ in subject.full.named_parameters() if not name.startswith(gone)]
    blocks = {side for target in subject.plan.targets for side in (target.previous, target.next)}
    beginnings = tuple(f"{block}." for block in blocks)
    return names, [name for name in names if name.startswith(beginnings)]


def gradients(subject: Subject, model: nn.Module, names: Sequence[str]) -> tuple[Gradients, float, Tensor]:
    """The gradient of the mean loss by parameter, the loss, and the output."""
    with torch.enable_grad():
        made = subject.output(model, BATCH)
        loss = subject.mean_loss(made, BATCH)
        parameters = [model.get_parameter(name) for name in names]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return _named(names, parameters, found), float(loss.detach()), made.detach()


def through_output(subject: Subject, model: nn.Module, names: Sequence[str], moved: Tensor) -> Gradients:
    """How the full model's gradient changes if only its output is taken to be another."""
    with torch.enable_grad():
        made = subject.output(model, BATCH)
        here, there = made.detach().requires_grad_(True), moved.detach().requires_grad_(True)
        (at_here,) = torch.autograd.grad(subject.mean_loss(here, BATCH), here)
        (at_there,) = torch.autograd.grad(subject.mean_loss(there, BATCH), there)
        parameters = [model.get_parameter(name) for name in names]
        found = torch.autograd.grad(made, parameters, at_there - at_here, allow_unused=True)
    return _named(names, parameters, found)


def gradient_sensitivity(
    subject: Subject, model: nn.Module, names: Sequence[str], *, iterations: int, seed: int
) -> float:
    """G_Theta: the largest singular value of z -> J' grad L(z) at the model's own output."""
    parameters = [model.get_parameter(name) for name in names]
    with torch.enable_grad(), differentiable_attention():
        made = subject.output(model, BATCH)
        z = made.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(subject.mean_loss(z, BATCH), z, create_graph=True)
        cotangent = torch.zeros_like(made, requires_grad=True)
        pulled = torch.autograd.grad(made, parameters, cotangent, create_graph=True, allow_unused=True)
        used = [p for p in pulled if p is not None]
        reached = [p for p, found in zip(parameters, pulled, strict=True) if found is not None]
        v = torch.randn(made.shape, generator=torch.Generator().manual_seed(seed)).to(made)
        size = 0.0
        for _ in range(iterations):
            v = v / v.norm().clamp_min(1e-30)
            (curved,) = torch.autograd.grad(slope, z, v, retain_graph=True)
            down = torch.autograd.grad(made, reached, curved, retain_graph=True)
            before, size = size, float(torch.stack([d.double().norm() for d in down]).norm())
            (up,) = torch.autograd.grad(used, cotangent, down, retain_graph=True)
            (v,) = torch.autograd.grad(slope, z, up, retain_graph=True)
            if abs(size - before) < SETTLED * size:
                break
    return size


def bias(true: Gradients, other: Gradients, pulled: Gradients, names: Sequence[str]) -> Bias:
    flat = [torch.cat([found[name].double().flatten() for name in names]) for found in (true, other, pulled)]
    own, changed, output = flat
    norms = float(own.norm()) * float(changed.norm())
    return Bias(
        true=float(own.norm()),
        measured=float((changed - own).norm()),
        cosine=float(own @ changed) / norms if norms else 0.0,
        through_output=float(output.norm()),
    )


def _named(names: Sequence[str], parameters: Sequence[Tensor], found: Sequence[Tensor | None]) -> Gradients:
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient.detach()
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }
