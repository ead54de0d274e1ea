"""Fit replacements for removed blocks and realign the kept ones, in one pass over the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from ..operators._base.ridge import Moments
from .activations import Arguments, ValueKey
from .batches import Data, device_of
from .blockwise import BlockOrder, BlockwiseRun, Calls, find_order, next_calls, record_calls, run_with_hooks
from .forms import Form, replace_block_
from .measure import parameter_uses
from .realign import LayerFit, realign_block_, solve_layer_, target_keys, teacher_values
from .regression_rows import layer_rows
from .replacement_fit import BlockFit, ReplacedBlock, fit_block
from .structure import Layer, read_structure

Progress = Callable[[str], None]
MAX_OUTPUTS = 4096  # of a classifier, solved at a time


@dataclass(frozen=True, slots=True)
class Fitted:
    """The fits of replacements, and of the layers of kept blocks."""

    blocks: tuple[BlockFit, ...]
    layers: tuple[LayerFit, ...]


@torch.no_grad()
def fit_(
    student: nn.Module,
    teacher: nn.Module,
    forms: Mapping[str, Form],
    data: Data,
    blocks: tuple[str, ...],
    *,
    realign: bool = True,
    rank: int = 8,
    progress: Progress | None = None,
) -> Fitted:
    """Fit the student, a copy of the teacher, in place: replace the blocks in `forms`, realign later ones.

    Each fit maps the student's activations to the teacher's at that place, so that later fits correct errors of
    earlier ones. The replacement of the last of adjacent blocks replaces all of them. With no `forms`, the student
    has blocks removed already and is realigned.
    """
    order = find_order(teacher, blocks, data)
    start = min((order.blocks.index(name) for name in forms), default=0)
    if realign and start and gap_after(order, start - 1, forms):
        start -= 1
    run = BlockwiseRun(teacher, student, order, data, start)
    if not forms:
        run.changed, run.student_calls = True, record_calls(student, run.name, data)
    collapsed = order.collapse_spans(forms)
    block_fits: list[BlockFit] = []
    layer_fits: list[LayerFit] = []
    device, running = device_of(student), True
    while running:
        name = run.name
        block, own = teacher.get_submodule(name), student.get_submodule(name)
        outputs: list[Tensor] | None = None
        with data.offloader.loaded(block), data.offloader.loaded(own, write_back=True):
            if name in forms:
                replaced = describe_block(student, name, run.student_calls)
                calls = run.teacher_calls, run.student_calls
                replacement, fit, outputs = fit_block(replaced, collapsed[name], block, *calls, rank)
                replace_block_(student, name, replacement)
                block_fits.append(fit)
                run.changed = True
            elif realign and type(block).__name__ == type(own).__name__:  # not replaced yet
                gap = gap_after(order, run.index, forms)
                outputs, fits = _realign_block_(own, block, run, teacher, gap)
                run.changed = run.changed or bool(fits)
                layer_fits += fits
            if progress is not None:
                progress(name)
            running = run.advance(outputs)
        student.get_submodule(name).to(device)
    if realign:
        layer_fits += realign_classifier_(student, teacher, order, data)
    return Fitted(tuple(block_fits), tuple(layer_fits))


def describe_block(student: nn.Module, name: str, calls: Calls) -> ReplacedBlock:
    """A block of the student with its structure; ReplearnError if it changes the shape."""
    block = student.get_submodule(name)
    arguments = smallest_call(calls)
    structure = read_structure(block, arguments)
    if not structure.keeps_shape:
        raise ReplearnError(
            f"{name} turns {tuple(arguments.x.shape)} into {structure.trace.shape}; only blocks that keep the "
            "shape can go. Leave it out."
        )
    return ReplacedBlock(name, block, structure)


def smallest_call(calls: Calls) -> Arguments:
    """The arguments on the smallest batch, for tracing; on a single sample only if there is no larger batch."""
    return min(calls, key=lambda call: (len(call.saved.x) == 1, call.saved.x.numel())).arguments


def _realign_block_(
    block: nn.Module, teacher_block: nn.Module, run: BlockwiseRun, teacher: nn.Module, gap: Sequence[str]
) -> tuple[list[Tensor] | None, list[LayerFit]]:
    """Realign a kept block; in a transformer the last layer also compensates for a gap of removed blocks after it.

    Queries and keys are not fitted, so the blocks after a gap need inputs close to the teacher's. Convolutional
    blocks do not: all their layers are fitted, and they compensate better themselves.
    """
    if not run.changed and not gap:
        return None, []
    structure, num_uses = read_structure(block, smallest_call(run.student_calls)), parameter_uses(run.student)
    untied = {path for path, layer in block.named_modules() if num_uses[id(getattr(layer, "weight", None))] == 1}
    targets = {path: key for path, key in target_keys(structure).items() if path in untied}
    end = structure.sums[-1].key if structure.kind == "transformer" else None
    last = [layer.path for layer in structure.layers if layer.path in targets and layer.sum == end is not None]
    if not run.changed:
        targets = {path: targets[path] for path in last}
    if not targets:
        return None, []
    outputs, values = teacher_values(teacher_block, run.teacher_calls, list(targets.values()))
    if gap and last:
        calls = next_calls(teacher_block, run.teacher_calls, outputs)
        after_gap = values_after_gap(teacher, gap, calls, structure.after)
        if after_gap is None and not run.changed:
            return outputs, []
        for found, value in zip(values, after_gap or (), strict=bool(after_gap)):
            found[targets[last[0]]] = value
    return outputs, realign_block_(block, structure, run.student_calls, targets, values, run.name)


def gap_after(order: BlockOrder, at: int, forms: Mapping[str, Form]) -> list[str]:
    """The removed blocks right after one, if nothing replaces them; the form of the last one counts."""
    removed = takewhile(lambda name: name in forms and name in order.follows, order.blocks[at + 1 :])
    gap = [] if order.blocks[at] in forms else list(removed)
    return gap if gap and forms[gap[-1]] == "removal" else []


def values_after_gap(
    teacher: nn.Module, gap: Sequence[str], calls: Calls, after: tuple[str, ...] | None
) -> list[Tensor] | None:
    """The teacher's values at the last sum of a gap; None if what follows that sum is not `after`."""
    for name in gap[:-1]:
        block = teacher.get_submodule(name)
        with calls[0].offloader.loaded(block):
            calls = next_calls(block, calls)
    block = teacher.get_submodule(gap[-1])
    with calls[0].offloader.loaded(block):
        structure = read_structure(block, smallest_call(calls))
        if not structure.sums or after is None or structure.after != after:
            return None
        modules = [block.get_submodule(step) for step in after if not step.startswith("=")]
        if any(True for module in modules for _ in module.parameters()):
            return None
        last_sum = ValueKey(structure.sums[-1].key)
        return [values[last_sum] for values in teacher_values(block, calls, [last_sum])[1]]


def realign_classifier_(student: nn.Module, teacher: nn.Module, order: BlockOrder, data: Data) -> list[LayerFit]:
    """Fit the last linear layer after the blocks to the teacher's outputs of it."""
    name = find_classifier(teacher, order, data)
    if not name:
        return []
    layer, teacher_layer = student.get_submodule(name), teacher.get_submodule(name)
    calls = [record_calls(model, name, data) for model in (teacher, student)]
    spec, fits = Layer("0", ("linear", 0), 0), []
    with data.offloader.loaded(layer, write_back=True), data.offloader.loaded(teacher_layer):
        for part, teacher_part in zip(split_outputs(layer), split_outputs(teacher_layer), strict=True):
            fitting, held_out = Moments(), Moments()
            for theirs, own in zip(*calls, strict=True):
                for a, b in layer_rows(part, own.arguments.x, teacher_part(theirs.arguments.x), tokens=own.tokens):
                    (held_out if own.held_out else fitting).add(a, b)
            fits.append(solve_layer_(nn.Sequential(part), spec, fitting, held_out, name))
    return fits


def split_outputs(layer: nn.Module) -> list[nn.Linear]:
    """A linear layer as several with at most MAX_OUTPUTS outputs, which share its weights."""
    weights, parts = dict(layer.named_parameters()), []
    for at in range(0, len(weights["weight"]), MAX_OUTPUTS):
        part = nn.Linear(1, 1, bias="bias" in weights, device="meta")
        for name, value in weights.items():
            setattr(part, name, nn.Parameter(value[at : at + MAX_OUTPUTS], requires_grad=False))
        parts.append(part)
    return parts


def find_classifier(model: nn.Module, order: BlockOrder, data: Data) -> str:
    """The last linear layer that runs once after the blocks and has an untied weight; '' if there is none."""
    last, called = order.blocks[-1], []
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or name == last]
    run_with_hooks(model, names, data, lambda name, *_: called.append(name))
    later = called[called.index(last) + 1 :]
    if not later or later.count(later[-1]) > 1:
        return ""
    return later[-1] if parameter_uses(model)[id(model.get_submodule(later[-1]).weight)] == 1 else ""
