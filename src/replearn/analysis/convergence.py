"""The convergence statements of the paper's theory section, measured while a replaced model trains by plain SGD.

    mean_t |grad J|^2  <=  2 (J_0 - J*) / (eta T)  +  eta L_J sigma^2 / B          (eq:sgd_repl_convergence_short)
    min_t |grad_s l|^2 <=  2 min_t |grad_s J|^2  +  2 B_grad^2                 (eq:stationarity_transfer_short)

The first asks for eta <= 1 / L_J and for steps that follow grad J on average (eq:sgd_assumption_short). Operators
that read their sources under stop-gradient follow another direction; how far off it is, is measured. l is the full
network's loss with the kept weights of the step and the removed blocks as they start: RepL never trains these.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.running import call, differentiable_attention
from ..errors import ReplearnError
from ..fitting.closed_form import estimate_statistics_
from ..fitting.observe import Forward
from ..planning.data import Plan
from ..surgery.replace import check_fit, replace_
from .gradients import flowing_copy, shared_names
from .results import Convergence, ConvergenceStep
from .subject import Loss, output_of


def converge(
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Any],
    *,
    loss: Loss,
    forward: Forward = call,
    lr: float = 0.005,
    steps: int = 400,
    points: int = 20,
    seed: int = 0,
) -> Convergence:
    """Train a replaced copy of the model by SGD without momentum, and measure both sides of the bounds.

    J is the mean loss over all of `batches`, and a step takes one of them at random, so that its noise is known
    exactly. `loss(output, batch)` is the mean over a batch; batches are equally large. BatchNorm's statistics are
    set on the batches before the first step and stay: with each batch's own, J would be no mean over samples. J*
    is taken as 0. Everything is measured before each of `points` evenly spaced steps. The model is not changed.
    Raises ReplearnError for fewer than two batches, a plan that does not fit, and a run that diverges.
    """
    if len(batches) < 2 or not 2 <= points <= steps:
        raise ReplearnError(
            f"{len(batches)} batches, {steps} steps and {points} points: give at least two batches, two points "
            "and as many steps as points."
        )
    check_fit(model, plan)
    full = copy.deepcopy(model).requires_grad_(True)

    def on(batch: Any) -> Callable[[nn.Module], Any]:
        return lambda net: forward(net, batch)

    estimate_statistics_(full.eval(), map(on, batches))
    student = replace_(copy.deepcopy(full), plan).eval()
    flowing = flowing_copy(full, student, plan)
    names = [name for name, parameter in student.named_parameters() if parameter.requires_grad]
    shared = shared_names(full, plan)
    order, sgd = torch.Generator().manual_seed(seed), torch.optim.SGD(student.parameters(), lr=lr)

    def mean_loss(net: nn.Module, batch: Any) -> Tensor:
        return loss(output_of(forward(net, batch)), batch)

    def gradient(net: nn.Module, wanted: Sequence[str]) -> tuple[Tensor, float, float]:
        """The gradient of J, E|g - E g|^2 over the batches, and J."""
        parameters = [net.get_parameter(name) for name in wanted]
        rows, values = [], []
        for batch in batches:
            values.append(mean_loss(net, batch))
            parts = torch.autograd.grad(values[-1], parameters, materialize_grads=True)
            rows.append(flat(parts).detach().double())
        found = torch.stack(rows)
        noise = (found - found.mean(0)).square().sum(1).mean()
        return found.mean(0), float(noise), float(torch.stack(values).mean().detach())

    def smoothness(iterations: int = 10) -> float:
        """The largest absolute eigenvalue of J's Hessian here, by power iteration: L_J is at least that."""
        parameters = [flowing.get_parameter(name) for name in names]
        v = torch.randn(sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(0))
        v = v.to(parameters[0])
        for _ in range(iterations):
            v, total = v / v.norm().clamp_min(1e-30), torch.zeros_like(v)
            for batch in batches:
                with differentiable_attention():
                    made = mean_loss(flowing, batch)
                    parts = torch.autograd.grad(made, parameters, create_graph=True, materialize_grads=True)
                    along = flat(parts) @ v
                total += flat(torch.autograd.grad(along, parameters, materialize_grads=True))
            v = total / len(batches)
        return float(v.norm())

    def measured(step: int) -> ConvergenceStep:
        state = student.state_dict()
        flowing.load_state_dict(state)
        full.load_state_dict({name: state[name] for name in full.state_dict() if name in state}, strict=False)
        true, _, value = gradient(flowing, names)
        followed, noise, _ = gradient(student, names)
        if not torch.isfinite(followed).all():
            raise ReplearnError(f"SGD has diverged before step {step}: write a smaller lr.")
        kept, whole = gradient(flowing, shared)[0], gradient(full, shared)[0]
        return ConvergenceStep(
            step=step,
            loss=value,
            squared_gradient=float(true.square().sum()),
            stop_gradient_bias=float((followed - true).norm() / true.norm().clamp_min(1e-30)),
            noise=noise,
            smoothness=smoothness(),
            shared_squared=float(kept.square().sum()),
            full_squared=float(whole.square().sum()),
            bias_squared=float((kept - whole).square().sum()),
        )

    found: list[ConvergenceStep] = []
    with torch.enable_grad():
        for step in range(steps):
            if step == steps * len(found) // points:
                found.append(measured(step))
            sgd.zero_grad()
            mean_loss(student, batches[int(torch.randint(len(batches), (), generator=order))]).backward()
            sgd.step()
    return Convergence(lr=lr, num_steps=steps, points=tuple(found))


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
