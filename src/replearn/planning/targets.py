"""One target: which weights its operator reads from which neighbour, and how many parameters it has."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from .. import operators
from ..blocks.anatomy import Anatomy, Part, resolve
from ..blocks.stacks import Stack, class_path
from ..errors import ReplearnError
from ..operators._base.operator import Operator
from ..operators._base.options import Need, Options, ReadingOptions, Side
from ..operators._base.shell import parameter_names
from ..operators._base.site import Site, part_of, stored_shape
from .data import Read, Target

RECORDER = "transformers.utils.output_capturing"  # the module of Hugging Face's hooks that record hidden states


def default_operator(anatomy: Anatomy) -> Options:
    """The paper's operator for this kind of block."""
    return next(cls() for cls in operators.available().values() if cls.default_for == anatomy.kind)


def build_target(model: nn.Module, stack: Stack, position: int, options: Options) -> Target:
    """The target at a legal position, or a ReplearnError that says why the operator does not fit."""
    anatomy = stack.anatomies[position - 1]
    previous, name, following = stack.blocks[position - 2 : position + 1]
    if anatomy.kind not in options.kinds:
        raise ReplearnError(
            f"the operator {options.name!r} suits {', '.join(options.kinds)} blocks, and this is a "
            f"{anatomy.kind} block ({stack.block_type})"
        )
    blocks = {place: model.get_submodule(place) for place in (name, previous, following)}
    block = blocks[name]
    neighbours: dict[Side, tuple[nn.Module, Anatomy]] = {
        "previous": (blocks[previous], stack.anatomies[position - 2]),
        "next": (blocks[following], stack.anatomies[position]),
    }
    if isinstance(options, ReadingOptions):
        refuse_computed_weights(blocks)
    reads: list[Read] = []
    notes: list[str] = []
    needs = options.needs(anatomy)
    if any(need.role == "*" for need in needs):  # every parameter of the block
        needs = tuple(Need(path, by_path=True) for path in parameter_names(block))
    for need in needs:
        found, note = choose_reads(need, anatomy, block, neighbours, options)
        reads += found
        notes += note
    target = Target(
        name=name,
        stack=stack.name,
        position=position,
        previous=previous,
        next=following,
        block_type=class_path(block),
        anatomy=anatomy,
        operator=options,
        reads=tuple(reads),
        parameters_before=trainable(block.parameters()),
        parameters_after=0,
        notes=tuple(dict.fromkeys(notes)),
    )
    built = build_operator(model, target, torch.device("meta"))
    trained = trainable(built.parameters())
    return replace(target, parameters_after=trained, parameters_deployed=built.num_deployed())


def build_operator(model: nn.Module, target: Target, device: torch.device | None = None) -> Operator:
    """Build a target's operator, by default on its block's device, without changing the model."""
    if device is None:
        blocks = (model.get_submodule(name) for name in (target.name, target.previous))
        devices = (parameter.device for block in blocks for parameter in block.parameters())
        device = next(devices, torch.device("cpu"))
    return target.operator.module(Site(target, device, model))


def choose_reads(
    need: Need,
    anatomy: Anatomy,
    block: nn.Module,
    neighbours: dict[Side, tuple[nn.Module, Anatomy]],
    options: Options,
) -> tuple[list[Read], list[str]]:
    """The reads of one weight, from the sides where its shape fits, and notes on sides where it does not."""

    def part_in(theirs: Anatomy, role: str) -> Part:
        return Part(role) if need.by_path else part_of(theirs, role, "the operator reads")

    shape = shape_of(block, part_in(anatomy, need.part()))
    fits: dict[Side, Part] = {}
    misfits: dict[Side, str] = {}
    for side in options.sides:
        neighbour, theirs = neighbours[side]
        part = part_in(theirs, need.part(side))
        found = shape_of(neighbour, part)
        if found is not None and found == shape:
            fits[side] = part
        else:
            misfits[side] = f"{side} {part.path} is {found}, not {shape}"
    if not options.sides:
        return [], []
    if not fits:
        raise ReplearnError(f"no source fits its {need.part()}: {'; '.join(misfits.values())}")
    notes = [
        f"{need.role} comes from the {side} source alone ({reason})"
        for side in fits
        for other, reason in misfits.items()
        if side != other and (need.mix or need.prefer == other)
    ]
    if need.mix:
        return [Read(need.role, side, part) for side, part in fits.items()], notes
    side = need.prefer if need.prefer in fits else next(iter(fits))
    return [Read(need.role, side, fits[side])], notes


def shape_of(block: nn.Module, part: Part) -> tuple[int, ...] | None:
    """The shape of a part's weight as (out, in, ...); for a norm, of all its parameters."""
    try:
        found = resolve(block, part.path)
    except AttributeError:
        return None
    if isinstance(found, nn.Module):
        weight = getattr(found, "weight", None)
        found = weight if weight is not None else torch.empty(0)
    return None if found is None else stored_shape(found, part)  # None: a bias that was switched off


def has_hooks(block: nn.Module) -> bool:
    """True if the block itself has hooks, other than Hugging Face's for hidden states, which operators get too.

    Hooks of modules inside the block are part of the block.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(not records_hidden_states(hook) for name in names for hook in getattr(block, name).values())


def refuse_computed_weights(blocks: dict[str, nn.Module]) -> None:
    """Raise for layers whose weight is computed at every call and is no parameter that could be read or set."""
    for name, block in blocks.items():
        for path, layer in block.named_modules():
            hooks = [type(hook).__module__ for hook in layer._forward_pre_hooks.values()]
            if isinstance(layer, ParametrizationList) or any(m.startswith("torch.nn.utils.") for m in hooks):
                place = f"{name}.{path}".partition(".parametrizations")[0].rstrip(".")
                raise ReplearnError(
                    f"{place} computes its weight anew at every call (weight_norm, spectral_norm, pruning or "
                    "another parametrization), so there is none to read; make it a plain parameter first, as "
                    "torch.nn.utils.parametrize.remove_parametrizations does, or use operators.Removal()"
                )


def trainable(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def records_hidden_states(hook: Any) -> bool:
    """True for Hugging Face's own hooks, which record outputs and change nothing."""
    return getattr(hook, "__module__", None) == RECORDER
