"""What training and running a model costs, estimated from shapes, without its weights and without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..blocks.stacks import find_stacks
from ..errors import ReplearnError
from ..planning.data import Plan
from ..planning.validate import refuse_wrapped
from ..surgery.replace import check_fit, exchange_, operators_of, set_submodule
from .data import BlockCost, Cost, ModelCost, Promise, optimizer_states
from .fake import check_precision, double_of, on_meta
from .machines import Machine, seconds_of
from .recorder import Operation
from .training_step import Loss, run_forward, run_step


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
    """Predict what a plan changes, while training and once deployed: parameters, FLOPs, time, and training memory.

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
    names = {name for stack in find_stacks(model) for name in stack.blocks}
    for name, _ in operators_of(model):
        parent = name.rpartition(".")[0]
        names |= {f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children()}
    order = [name for name, _ in model.named_modules() if name in names]
    return cost_of(model, example, order, Terms(optimizer, precision, machine, loss))


def replaced_double(model: nn.Module, plan: Plan) -> nn.Module:
    """The replaced model on the meta device; the user's own is not touched."""
    double = double_of(model, on_meta)
    check_fit(double, plan)
    exchange_(double, plan, start=False)
    return double


def deployed_double(model: nn.Module) -> nn.Module:
    """The model on the meta device with its operators as plain modules."""
    double = double_of(model, on_meta)
    for name, operator in list(operators_of(double)):
        set_submodule(double, name, operator.fuse())
    return double


def shapes_of(example: Any) -> str:
    """The shapes and dtypes of a batch, as `64x3x224x224 float32`."""
    found = []
    for path, leaf in tree_flatten_with_path(example)[0]:
        if isinstance(leaf, Tensor):
            name = "".join(character for character in keystr(path) if character.isalpha() or character == "_")
            shape, dtype = "x".join(map(str, leaf.shape)), str(leaf.dtype).removeprefix("torch.")
            found.append(f"{name} {shape} {dtype}".strip())
    return ", ".join(found)


def cost_of(model: nn.Module, example: Any, names: Iterable[str], terms: Terms) -> ModelCost:
    """The cost of a model as it is, by the blocks with these names; without an example, of its weights alone."""
    operators = {name: operator.target.operator.label() for name, operator in operators_of(model)}
    kinds = {name: operators.get(name) or type(model.get_submodule(name)).__name__ for name in names}
    deployed = deployed_double(model)
    if example is None:
        parts, peak, kernels = {name: Cost() for name in (*kinds, "")}, 0, 0
    else:
        recorder, saved = run_step(model, example, kinds, operators, terms.precision, terms.loss)
        inference = run_forward(deployed, example, kinds, terms.precision)
        parts = {name: _work(name, recorder.operations, inference, terms) for name in (*kinds, "")}
        parts = {name: replace(part, activation_bytes=saved.get(name, 0)) for name, part in parts.items()}
        peak, kernels = recorder.peak, len(recorder.operations)
    shipped = _weights(deployed, kinds)
    for name, weights in _weights(model, kinds).items():
        parts[name] += _weights_cost(weights, shipped[name], terms, name in kinds and name not in operators)
    blocks = tuple(BlockCost(name, kind, parts[name]) for name, kind in kinds.items())
    found = ModelCost(type(model).__name__, blocks, parts[""], 0, kernels)
    held = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    peak += held + found.total.optimizer_bytes
    return replace(found, peak_bytes=max(peak, found.total.memory_bytes))


def _work(name: str, training: list[Operation], inference: list[Operation], terms: Terms) -> Cost:
    """The FLOPs and seconds of a block in a training step, and once deployed."""
    mine, shipped = ([op for op in found if op.block == name] for found in (training, inference))

    def seconds(operations: list[Operation]) -> float:
        machine = terms.machine
        return 0.0 if machine is None else sum(seconds_of(op, machine, terms.precision) for op in operations)

    return Cost(
        forward_flops=sum(op.flops for op in mine if not op.synthesis and op.phase == "forward"),
        backward_flops=sum(op.flops for op in mine if not op.synthesis and op.phase == "backward"),
        synthesis_flops=sum(op.flops or op.outputs for op in mine if op.synthesis),
        seconds=seconds(mine),
        deployed_flops=sum(op.flops for op in shipped),
        deployed_seconds=seconds([op for op in shipped if "batch_norm" not in op.name]),
    )


def _weights(model: nn.Module, kinds: Iterable[str]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each block and of the rest (''), a shared one where it comes first."""
    names = tuple(kinds)
    found: dict[str, list[nn.Parameter]] = {name: [] for name in (*names, "")}
    for path, parameter in model.named_parameters():
        inside = [name for name in names if path.startswith(f"{name}.")]
        found[max(inside, key=len) if inside else ""].append(parameter)
    return found


def _weights_cost(weights: list[nn.Parameter], deployed: list[nn.Parameter], terms: Terms, is_block: bool) -> Cost:
    """What weights cost by themselves: their memory, gradients, optimizer state, and the optimizer's step."""
    states = optimizer_states(terms.optimizer)
    trained = [parameter for parameter in weights if parameter.requires_grad]
    trained_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    # read weight and gradient, write the weight; read and write each state
    moved = trained_bytes * (3 + 2 * states)
    return Cost(
        parameters=sum(parameter.numel() for parameter in weights),
        trainable=sum(parameter.numel() for parameter in trained),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in weights),
        gradient_bytes=trained_bytes,
        optimizer_bytes=trained_bytes * states,
        seconds=0.0 if terms.machine is None else moved / terms.machine.bandwidth,
        deployed_parameters=sum(parameter.numel() for parameter in deployed),
        blocks=int(is_block),
    )
