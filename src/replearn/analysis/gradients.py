"""Gradient bias on the parameters that the full and the replaced model share, and its bound."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..blocks.running import differentiable_attention
from ..operators._base.options import ReadingOptions
from ..planning.data import Plan
from ..planning.targets import build_operator
from ..surgery.replace import set_submodule
from .results import Bias, GradientBias
from .subject import Subject
from .suffix import BATCH, SETTLED

Gradients = dict[str, Tensor]


def gradient_bias(subject: Subject, output_bound: float, *, iterations: int, seed: int) -> GradientBias:
    """Both gradients of the mean loss of one held-out batch, in eval mode, and B_grad for it.

    The paper's sum bounds the deviation of one sample; over a batch of B samples deviations add up to
    sqrt(B) times that, which is what the sensitivity of the batch's gradient is multiplied with.
    """
    full = copy.deepcopy(subject.full).requires_grad_(True)
    flowing = flowing_copy(full, subject.replaced, subject.plan)
    names = shared_names(full, subject.plan)
    read = tuple(f"{side}." for target in subject.plan.targets for side in (target.previous, target.next))
    sources = [name for name in names if name.startswith(read)]
    stopped = copy.deepcopy(subject.replaced).requires_grad_(True)
    true, loss, z = gradients(subject, full, names)
    held, loss_replaced, moved = gradients(subject, stopped, names)
    free, _, _ = gradients(subject, flowing, names)
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


def shared_names(full: nn.Module, plan: Plan) -> list[str]:
    """The names of all kept parameters."""
    gone = tuple(f"{target.name}." for target in plan.targets)
    return [name for name, _ in full.named_parameters() if not name.startswith(gone)]


def flowing_copy(full: nn.Module, replaced: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the replaced model without stop-gradient on the sources."""
    made = copy.deepcopy(full).requires_grad_(True)
    for target in plan.targets:
        if isinstance(target.operator, ReadingOptions):
            target = replace(target, operator=replace(target.operator, stop_gradient=False))
        operator = build_operator(made, target).eval()
        operator.load_state_dict(replaced.get_submodule(target.name).state_dict())
        set_submodule(made, target.name, operator)
    return made


def gradients(subject: Subject, model: nn.Module, names: Sequence[str]) -> tuple[Gradients, float, Tensor]:
    """The gradient of the mean loss by parameter, the loss, and the output."""
    with torch.enable_grad():
        made = subject.output(model, BATCH)
        loss = subject.mean_loss(made, BATCH)
        parameters = [model.get_parameter(name) for name in names]
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return dict(zip(names, found, strict=True)), float(loss.detach()), made.detach()


def through_output(subject: Subject, model: nn.Module, names: Sequence[str], moved: Tensor) -> Gradients:
    """The change of the full model's gradient if only the output in the loss's gradient is exchanged."""
    with torch.enable_grad():
        made = subject.output(model, BATCH)
        here, there = made.detach().requires_grad_(True), moved.detach().requires_grad_(True)
        (at_here,) = torch.autograd.grad(subject.mean_loss(here, BATCH), here)
        (at_there,) = torch.autograd.grad(subject.mean_loss(there, BATCH), there)
        parameters = [model.get_parameter(name) for name in names]
        found = torch.autograd.grad(made, parameters, at_there - at_here, materialize_grads=True)
    return dict(zip(names, found, strict=True))


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
