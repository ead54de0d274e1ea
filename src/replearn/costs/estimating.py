"""The doors `estimate` and `predict`: what training a model costs, without its weights and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..errors import ReplearnError
from ..plans import Plan
from ..similarity import call
from ..stacks import find_stacks
from ..surgery import check_fit, exchange_, operators_of
from ..whole import refuse_wrapped
from .backward import run_backward
from .costing import BlockCost, Cost, ModelCost, Promise, optimizer_states
from .fake import check_precision, double_of, example_on_fake_gpu, fake_gpu, on_fake_gpu, on_meta
from .machines import Machine, seconds_of
from .operations import tensors_in
from .recorder import Recorder

Loss = Callable[[Any], Tensor]


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
    >>> promise = replearn.estimate(model, images, replearn.plan(model))
    >>> promise.after.total.trainable == replearn.plan(model).parameters_after
    True
    """
    check_precision(precision)
    refuse_wrapped(model)
    names = [name for stack in find_stacks(model) for name in stack.blocks]
    settings = (optimizer, precision, machine, loss)
    before = _cost(model, example, names, *settings)
    if plan is None:
        return Promise(before, before, precision, optimizer, machine)
    replaced = replaced_double(model, plan)
    return Promise(before, _cost(replaced, example, names, *settings), precision, optimizer, machine)


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
    check_precision(precision)
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module as the first argument, got {type(model).__name__}.")
    names = {name for stack in find_stacks(model) for name in stack.blocks}
    for name, _ in operators_of(model):
        parent = name.rpartition(".")[0]
        names |= {f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children()}
    order = [name for name, _ in model.named_modules() if name in names]
    return _cost(model, example, order, optimizer, precision, machine, loss)


def replaced_double(model: nn.Module, plan: Plan) -> nn.Module:
    """The replaced model on the meta device; the user's own is not touched."""
    if not isinstance(plan, Plan):
        raise ReplearnError(f"plan is a Plan, not {type(plan).__name__}; make one with replearn.plan(model).")
    double = double_of(model, on_meta)
    check_fit(double, plan)
    exchange_(double, plan, start=False)
    return double


def _cost(
    model: nn.Module,
    example: Any,
    names: Iterable[str],
    optimizer: str,
    precision: str,
    machine: Machine | None,
    loss: Loss | None,
) -> ModelCost:
    states = optimizer_states(optimizer)
    kinds = {name: type(model.get_submodule(name)).__name__ for name in names}
    operators = {name: operator.target.operator.label() for name, operator in operators_of(model)}
    kinds = {name: operators.get(name, kind) for name, kind in kinds.items()}
    recorder, saved = _run(model, example, kinds, operators, precision, loss)
    parts = {name: _numbers(recorder, name, saved, machine, precision) for name in (*kinds, "")}
    for name, weights in _weights(model, kinds).items():
        parts[name] = parts[name] + weights_cost(weights, states, machine)
    held = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    blocks = tuple(BlockCost(name, kind, parts[name]) for name, kind in kinds.items())
    state = sum(part.optimizer_bytes for part in parts.values())
    return ModelCost(
        type(model).__name__, blocks, parts[""], held + state + recorder.peak, len(recorder.operations)
    )


def _run(
    model: nn.Module,
    example: Any,
    kinds: Iterable[str],
    operators: Iterable[str],
    precision: str,
    loss: Loss | None,
) -> tuple[Recorder, dict[str, int]]:
    """One training step on the fake GPU, forward and backward."""
    with fake_gpu(precision):
        double = double_of(model, on_fake_gpu).train()
        batch = example_on_fake_gpu(example)
        recorder = Recorder(double, tuple(kinds), tuple(operators))
        recorder.mark_batch(batch)
        with recorder, recorder.watching(), recorder.saving(), torch.enable_grad():
            try:
                made = call(double, batch)
                value = (loss or default_loss)(made)
            except ReplearnError:
                raise
            except Exception as error:
                raise ReplearnError(_cannot_run(double, recorder, error)) from error
            if not isinstance(value, Tensor) or not value.requires_grad:
                raise ReplearnError(
                    f"The loss of {type(model).__name__} depends on no trainable parameter, so there is "
                    "nothing to train. Unfreeze some, or give loss=lambda output: ..."
                )
            torch.clear_autocast_cache()  # as leaving `with torch.autocast` does
            saved = recorder.saved_bytes((made, value))
            recorder.phase = "backward"
            del made
            gradients = run_backward(value.sum(), recorder)
            del gradients, value
    return recorder, saved


def default_loss(output: Any) -> Tensor:
    """The output's own loss; else cross entropy over the classes; else the sum of what it holds."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.dim() >= 2 and logits.is_floating_point():
        # tokens have their classes last, images and maps have them second
        rows = logits.reshape(-1, logits.shape[-1]) if logits.dim() == 3 else logits
        shape = (rows.shape[0], *rows.shape[2:])
        return cross_entropy(rows, torch.empty(shape, dtype=torch.long, device=rows.device))
    floating = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not floating:
        raise ReplearnError(
            f"The model gives {type(output).__name__} without a number to train on: give loss=lambda output: ..."
        )
    return torch.stack([tensor.sum().float() for tensor in floating]).sum()


def _cannot_run(model: nn.Module, recorder: Recorder, error: Exception) -> str:
    path = recorder.path[-1] if recorder.path else ""
    inside = type(model.get_submodule(path)).__name__
    where = f"{path} ({inside})" if path else inside
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return (
        f"{type(model).__name__} can't be run without values: {where} failed with {type(error).__name__}: {reason}. "
        "Either the example does not fit (give it as the model takes it: a tensor, a tuple of arguments or a dict of "
        "keywords), or the module asks for the value of a tensor (.item(), an if), which shapes alone can't answer."
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
