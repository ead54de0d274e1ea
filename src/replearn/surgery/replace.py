"""Replace blocks by operators, exactly as the plan says."""

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..blocks.anatomy import resolve
from ..blocks.stacks import class_path, find_stacks
from ..errors import ReplearnError
from ..operators._base.operator import Operator
from ..planning.data import Plan, Target
from ..planning.legality import Survey
from ..planning.planner import count_parameters
from ..planning.targets import build_operator
from ..planning.validate import ordinary_tensors, refuse_wrapped
from .hidden_states import record_replacement
from .plan_metadata import attach_plan_, attached_plan, detach_plan_

DECIDED = ("stack", "position", "previous", "next", "anatomy", "reads", "parameters_after")


@ordinary_tensors()
def replace_(model: nn.Module, plan: Plan) -> nn.Module:
    """Replace the planned blocks in place, and return the same model; make the optimizer after this.

    Warns if an optimizer already has parameters of a removed block: it would train the removed block and not the
    operator. Raises ReplearnError, with the model unchanged, if the plan does not fit the model, or if the model
    is replaced, wrapped, sharded or compiled already.
    """
    check_fit(model, plan)
    before, after = count_parameters(model, plan.targets)
    if (before, after) != (plan.parameters_before, plan.parameters_after):
        raise ReplearnError(
            f"The plan does not fit: this {type(model).__name__} has {before:,} trainable parameters and would "
            f"have {after:,}, and the plan promises {plan.parameters_before:,} and {plan.parameters_after:,}. If "
            "you froze parameters or changed the head since, plan again."
        )
    warn_of_optimizers(model, plan)
    exchange_(model, plan, start=True)
    return model


def warn_of_optimizers(model: nn.Module, plan: Plan) -> None:
    """Warn of live optimizers with parameters of removed blocks; searched if these have other references."""
    alone: dict[str, nn.Parameter | None] = {"weight": nn.Parameter(torch.empty(0))}
    least = sys.getrefcount(alone["weight"])
    removed: dict[int, str] = {}
    for target in plan.targets:
        for module in model.get_submodule(target.name).modules():
            parameters = module._parameters
            shared = (name for name in parameters if sys.getrefcount(parameters[name]) > least)
            removed |= {id(parameters[name]): target.name for name in shared}
    removed.pop(id(None), None)
    for found in gc.get_objects() if removed else ():
        if issubclass(type(found), torch.optim.Optimizer):  # isinstance would call __class__ of proxy objects
            names = {removed[id(p)] for group in found.param_groups for p in group["params"] if id(p) in removed}
            if names:
                warnings.warn(
                    f"An optimizer, {type(found).__name__}, holds parameters of {', '.join(sorted(names)[:3])}, "
                    "which go: it would train them on, and not the operators. Make the optimizer after the "
                    "replacement.",
                    stacklevel=4,
                )


def exchange_(model: nn.Module, plan: Plan, *, start: bool) -> None:
    """Put the operators of a checked plan in place; with `start`, set their starting values."""
    # all operators are built before the first exchange, so a failure leaves the model unchanged
    built = [(target, build_operator(model, target)) for target in plan.targets]
    for target, operator in built if start else ():
        if all(parameter.device.type != "meta" for parameter in operator.parameters()):
            operator.reset_parameters()
        refuse_infinite(model, target, operator)
    for target, operator in built:
        block = model.get_submodule(target.name)
        operator.train(block.training)
        set_submodule(model, target.name, operator)
        record_replacement(model, block, operator)
    attach_plan_(model, plan)


def refuse_infinite(model: nn.Module, target: Target, operator: Operator) -> None:
    """Raise where an operator would start as inf or NaN."""
    for read in target.reads:
        block = getattr(target, read.side)
        found = resolve(model.get_submodule(block), read.part.path)
        for tensor in found.parameters() if isinstance(found, nn.Module) else (found,):
            if not tensor.is_meta and not bool(tensor.isfinite().all()):
                raise ReplearnError(
                    f"{block}.{read.part.path} holds inf or NaN, and the operator of {target.name} would be made "
                    "of it. Mend these weights first, or plan without this block."
                )
    if not all(bool(p.isfinite().all()) for p in operator.coefficients() if not p.is_meta):
        raise ReplearnError(
            f"The operator of {target.name} can't start: the rows of its sources are too long for their length to "
            "be computed (values beyond 1e18). Scale the weights down, or plan without this block."
        )


def plan_of(model: nn.Module) -> Plan:
    """The plan of a replaced model."""
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a replaced model (a torch.nn.Module), got {type(model).__name__}.")
    found = attached_plan(model)
    if found is not None:
        if found.targets and next(operators_of(model), None) is None:
            raise ReplearnError(
                f"The operators of this {type(model).__name__} are plain modules already, as timm's "
                "reparameterize_model leaves them. Run it as it is, or pass the model from before that."
            )
        return found
    for name, module in model.named_modules():
        if attached_plan(module) is not None:
            raise ReplearnError(
                f"{type(model).__name__} was not replaced itself, but its submodule {name} was: pass that one "
                f"(model.{name})."
            )
    raise ReplearnError(f"{type(model).__name__} was not replaced: call replearn.replace_(model, plan) first.")


def operators_of(model: nn.Module) -> Iterator[tuple[str, Operator]]:
    """Every operator in the model with its name; the parts of a composed operator are not listed."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, Operator) and not name.startswith(inside):
            inside = (*inside, f"{name}.")
            yield name, module


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


@contextmanager
def restored_on_error(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Put the planned blocks back if the body raises."""
    blocks = {target.name: model.get_submodule(target.name) for target in plan.targets}
    try:
        yield
    except BaseException:
        for name, block in blocks.items():
            set_submodule(model, name, block)
        detach_plan_(model)
        raise


def check_fit(model: nn.Module, plan: Plan) -> None:
    """Raise ReplearnError with the first difference if the plan was not made for such a model.

    Every target is planned again on this model and compared, because a plan may come from an untrusted file:
    nothing is done that `plan` itself would not have planned.
    """
    if not isinstance(plan, Plan):
        raise ReplearnError(f"This takes a Plan, got {type(plan).__name__}; make one with replearn.plan(model).")
    refuse_wrapped(model)
    stacks = find_stacks(model)
    again = {options: Survey(model, stacks, options) for options in {target.operator for target in plan.targets}}
    for target in plan.targets:
        survey = again[target.operator]
        for name in (target.name, target.previous, target.next):
            if name not in survey.places:
                raise ReplearnError(
                    f"The plan does not fit this {type(model).__name__}: it has no block {name!r}. The plan was "
                    f"made for a {plan.model} with {plan.num_blocks} blocks."
                )
        block = model.get_submodule(target.name)
        if class_path(block) != target.block_type:
            raise ReplearnError(
                f"The plan does not fit: {target.name} is a {class_path(block)}, and the plan was made for a "
                f"{target.block_type}."
            )
        found = survey.target(*survey.places[target.name])
        if isinstance(found, str):
            why = found.rstrip(".")
            raise ReplearnError(f"The plan does not fit: {target.name} has to be kept here, because: {why}.")
        for field in DECIDED:
            planned, now = getattr(target, field), getattr(found, field)
            if planned != now:
                values = f": {now}, and the plan says {planned}" if isinstance(now, (str, int)) else ""
                raise ReplearnError(
                    f"The plan does not fit: {field} of {target.name} is different in this model{values}. "
                    "Plan again, or use the model it was made for."
                )
    total = sum(len(stack) for stack in stacks)
    if total != plan.num_blocks:
        raise ReplearnError(
            f"The plan does not fit: this {type(model).__name__} has {total} blocks, and the plan was made for "
            f"{plan.num_blocks}. Plan again, or use the model it was made for."
        )


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: everything with weight decay, and the coefficients without.

    >>> import replearn, torch
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model))
    >>> optimizer = torch.optim.SGD(replearn.param_groups(model, 1e-4), lr=0.1)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.0001, 0.0]
    """
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    number = isinstance(weight_decay, (int, float)) and not isinstance(weight_decay, bool)
    if not number or not 0 <= weight_decay < float("inf"):
        raise ReplearnError(f"weight_decay={weight_decay!r}: write a number from 0 up, as 1e-4.")
    free = {id(p) for m in model.modules() if isinstance(m, Operator) for p in m.coefficients()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in free], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in free], "weight_decay": 0.0},
    ]
