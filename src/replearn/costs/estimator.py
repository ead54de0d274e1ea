"""Estimates of what training and running a model costs, from shapes alone: without weights, without a GPU."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..errors import ReplearnError
from ..planning.data import Plan
from ..planning.validate import refuse_wrapped
from ..surgery.replace import check_fit, exchange_, operators_of, set_submodule
from .data import Cost, ModelCost, Promise, optimizer_states
from .fake import check_precision, converted_copy, on_meta
from .machines import Machine, seconds_of
from .recorder import Operation
from .training_step import Loss, run_forward, run_step


@dataclass(frozen=True, slots=True)
class Terms:
    """The training settings that costs depend on; see `estimate`."""

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
    """Predict parameters, FLOPs, time and training memory before and after a plan, in training and once deployed.

    `example` is a batch as the model takes it (a tensor, a tuple of arguments, a dict of keywords); only its
    shapes count. Model and example may be on any device, meta too; neither is touched, and no weight is allocated.
    `precision` is float32, tf32, or bfloat16 or float16 for autocast; `machine` gives times. `loss(output)`
    defaults to the model's own loss where its output has one, else to cross entropy.

    Raises ReplearnError if the model can't run on shapes alone (it names the module), if the plan was made for
    another model, or if the example does not fit.

    >>> import torch, replearn
    >>> model, images = replearn.models.resnet32(), torch.empty(128, 3, 32, 32, device="meta")
    >>> promise = replearn.costs.estimate(model, images, replearn.plan(model))
    >>> promise.after.total.trainable == replearn.plan(model).parameters_after
    True
    """
    refuse_wrapped(model)
    terms = Terms(optimizer, precision, machine, loss)
    replaced = None if plan is None else replaced_copy(model, plan)
    before = cost_of(model, example, terms)
    after = before if replaced is None else cost_of(replaced, example, terms)
    return Promise(before, after, precision, optimizer, machine, shapes_of(example))


def predict(
    model: nn.Module,
    example: Any,
    *,
    optimizer: str = "adamw",
    precision: str = "float32",
    machine: Machine | None = None,
    loss: Loss | None = None,
) -> ModelCost:
    """Predict what one model costs as it is, replaced or not; see `estimate`."""
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module as the first argument, got {type(model).__name__}.")
    return cost_of(model, example, Terms(optimizer, precision, machine, loss))


def replaced_copy(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model on the meta device, replaced as planned."""
    copied = converted_copy(model, on_meta)
    check_fit(copied, plan)
    exchange_(copied, plan, start=False)
    return copied


def shapes_of(example: Any) -> str:
    """The shapes and dtypes of a batch, as `64x3x224x224 float32`."""
    found = []
    for path, leaf in tree_flatten_with_path(example)[0]:
        if isinstance(leaf, Tensor):
            name = "".join(character for character in keystr(path) if character.isalpha() or character == "_")
            shape, dtype = "x".join(map(str, leaf.shape)), str(leaf.dtype).removeprefix("torch.")
            found.append(f"{name} {shape} {dtype}".strip())
    return ", ".join(found)


def cost_of(model: nn.Module, example: Any, terms: Terms) -> ModelCost:
    """The cost of a model; without an example, of its weights alone."""
    deployed, machine = converted_copy(model, on_meta), terms.machine
    for name, operator in list(operators_of(deployed)):
        set_submodule(deployed, name, operator.fuse())
    training: list[Operation] = []
    inference: list[Operation] = []
    saved = peak = 0
    if example is not None:
        recorder, saved = run_step(model, example, terms.precision, terms.loss)
        training, peak = recorder.operations, recorder.peak
        inference = run_forward(deployed, example, terms.precision)

    def seconds(operations: list[Operation]) -> float:
        return 0.0 if machine is None else sum(seconds_of(op, machine, terms.precision) for op in operations)

    weights = list(model.parameters())
    trained = [parameter for parameter in weights if parameter.requires_grad]
    trained_bytes = sum(parameter.nbytes for parameter in trained)
    states = optimizer_states(terms.optimizer)
    # the optimizer's step: read weight and gradient, write the weight; read and write each state
    moved = trained_bytes * (3 + 2 * states)
    total = Cost(
        parameters=sum(parameter.numel() for parameter in weights),
        trainable=sum(parameter.numel() for parameter in trained),
        forward_flops=sum(op.flops for op in training if op.phase == "forward"),
        backward_flops=sum(op.flops for op in training if op.phase == "backward"),
        activation_bytes=saved,
        parameter_bytes=sum(parameter.nbytes for parameter in weights),
        gradient_bytes=trained_bytes,
        optimizer_bytes=trained_bytes * states,
        seconds=seconds(training) + (0.0 if machine is None else moved / machine.bandwidth),
        deployed_parameters=sum(parameter.numel() for parameter in deployed.parameters()),
        deployed_flops=sum(op.flops for op in inference),
        deployed_seconds=seconds([op for op in inference if "batch_norm" not in op.name]),
    )
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return ModelCost(type(model).__name__, total, max(peak + held + total.optimizer_bytes, total.memory_bytes))
