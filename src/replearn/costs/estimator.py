"""What training a model costs, estimated from shapes, without its weights and without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..blocks.stacks import find_stacks
from ..errors import ReplearnError
from ..planning.data import Plan
from ..planning.validate import refuse_wrapped
from ..surgery.replace import check_fit, exchange_, operators_of
from .data import BlockCost, Cost, ModelCost, Promise, optimizer_states
from .fake import check_precision, double_of, on_meta
from .machines import Machine, seconds_of
from .recorder import Recorder
from .training_step import Loss, run_step


@dataclass(frozen=True, slots=True)
class Terms:
    """How a model is trained; see `estimate`."""

    optimizer: str = "adamw"
    precision: str = "float32"
    machine: Machine | None = None
    loss: Loss | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)
        optimizer_states(self.optimizer)


def estimate(
    model: nn.Module,
    example: Any,
    plan: Plan | None = None,
    *,
    optimizer: str = "adamw",
    precision: str = "float32",
    machine: Machine | None = None,
    loss: Loss | None = None,
) -> Promise:
    """Predict what training costs, before and after a plan: parameters, FLOPs, memory, optimizer state, time.

    `example` is a batch as the model takes it (a tensor, a tuple of arguments, a dict of keywords); only its
    shapes count. Model and example may be on any device, meta too; neither is touched, and no weight is allocated.
    `precision` is float32, tf32, or bfloat16 or float16 for autocast; `machine` gives times. `loss(output)`
    defaults to the model's own loss where its output has one, else to cross entropy.

    Raises ReplearnError if the model can't run without values (it names the module), if the plan was made for
    another model, or if the example does not fit.

    >>> import torch, replearn
    >>> model, images = replearn.models.resnet32(), torch.empty(128, 3, 32, 32, device="meta")
    >>> promise = replearn.costs.estimate(model, images, replearn.plan(model))
    >>> promise.after.total.trainable == replearn.plan(model).parameters_after
    True
    """
    refuse_wrapped(model)
    names = [name for stack in find_stacks(model) for name in stack.blocks]
    terms = Terms(optimizer, precision, machine, loss)
    replaced = None if plan is None else replaced_double(model, plan)
    before = cost_of(model, example, names, terms)
    after = before if replaced is None else cost_of(replaced, example, names, terms)
    return Promise(before, after, precision, optimizer, machine)


def predict(
    model: nn.Module,
    example: Any,
    *,
    optimizer: str = "adamw",
    precision: str = "float32",
    machine: Machine | None = None,
    loss: Loss | None = None,
) -> ModelCost:
    """Predict what training one model costs as it is, replaced or not; see `estimate`."""
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module as the first argument, got {type(model).__name__}.")
    names = {name for stack in find_stacks(model) for name in stack.blocks}
    for name, _ in operators_of(model):
        parent = name.rpartition(".")[0]
        names |= {f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children()}
    order = [name for name, _ in model.named_modules() if name in names]
    return cost_of(model, example, order, Terms(optimizer, precision, machine, loss))


def replaced_double(model: nn.Module, plan: Plan) -> nn.Module:
    """The replaced model on the meta device; the user's own is not touched."""
    if not isinstance(plan, Plan):
        raise ReplearnError(f"plan is a Plan, not {type(plan).__name__}; make one with replearn.plan(model).")
    double = double_of(model, on_meta)
    check_fit(double, plan)
    exchange_(double, plan, start=False)
    return double


def cost_of(model: nn.Module, example: Any, names: Iterable[str], terms: Terms) -> ModelCost:
    """The cost of a model as it is, split over the blocks with these names."""
    machine, precision = terms.machine, terms.precision
    kinds = {name: type(model.get_submodule(name)).__name__ for name in names}
    operators = {name: operator.target.operator.label() for name, operator in operators_of(model)}
    kinds = {name: operators.get(name, kind) for name, kind in kinds.items()}
    recorder, saved = run_step(model, example, kinds, operators, precision, terms.loss)
    parts = {name: _numbers(recorder, name, saved, machine, precision) for name in (*kinds, "")}
    for name, weights in _weights(model, kinds).items():
        parts[name] = parts[name] + weights_cost(weights, optimizer_states(terms.optimizer), machine)
    held = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    blocks = tuple(BlockCost(name, kind, parts[name]) for name, kind in kinds.items())
    state = sum(part.optimizer_bytes for part in parts.values())
    return ModelCost(
        type(model).__name__, blocks, parts[""], held + state + recorder.peak, len(recorder.operations)
    )


def _numbers(
    recorder: Recorder, name: str, saved: dict[str, int], machine: Machine | None, precision: str
) -> Cost:
    forward = backward = synthesis = 0
    seconds = 0.0
    for operation in recorder.operations:
        if operation.block != name:
            continue
        if operation.synthesis:
            synthesis += operation.flops or operation.outputs
        elif operation.phase == "forward":
            forward += operation.flops
        else:
            backward += operation.flops
        if machine is not None:
            seconds += seconds_of(operation, machine, precision)
    return Cost(
        forward_flops=forward,
        backward_flops=backward,
        synthesis_flops=synthesis,
        activation_bytes=saved.get(name, 0),
        seconds=seconds,
    )


def _weights(model: nn.Module, kinds: Iterable[str]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each block and of the rest (''), a shared one where it comes first."""
    names = tuple(kinds)
    found: dict[str, list[nn.Parameter]] = {name: [] for name in (*names, "")}
    for path, parameter in model.named_parameters():
        inside = [name for name in names if path.startswith(f"{name}.")]
        found[max(inside, key=len) if inside else ""].append(parameter)
    return found


def weights_cost(weights: Iterable[nn.Parameter], states: int, machine: Machine | None) -> Cost:
    """What the weights cost by themselves: their memory, gradients, optimizer state, and the optimizer's step."""
    everything = list(weights)
    trained = [parameter for parameter in everything if parameter.requires_grad]
    trained_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    moved = trained_bytes * (
        3 + 2 * states
    )  # read weight and gradient, write the weight; read and write each state
    return Cost(
        parameters=sum(parameter.numel() for parameter in everything),
        trainable=sum(parameter.numel() for parameter in trained),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in everything),
        gradient_bytes=trained_bytes,
        optimizer_bytes=trained_bytes * states,
        seconds=0.0 if machine is None else moved / machine.bandwidth,
    )
