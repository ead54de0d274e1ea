"""The door `fit`: put something in the place of every block that goes, and realign what stays, in one walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from ..operators._base.ridge import Moments
from .batches import Data, device_of
from .calls import Arguments, Tap
from .corrections import Form, put_
from .layers import LayerFit, aims_of, realign_block_, solve_layer_, teacher_values
from .measure import holders
from .rows import rows
from .stand_ins import BlockFit, Place, fit_block
from .structure import Layer, understand
from .walking import Visit, Walk, Way, find_way, passed_on, run_noting, visits

Progress = Callable[[str], None]
OUTPUTS = 4096  # of a classifier that are solved at a time


@dataclass(frozen=True, slots=True)
class Fitted:
    """What stands where, and which layers of kept blocks were solved again."""

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
    """Fit the student, a copy of the teacher, in place: blocks in `forms` go, later ones are realigned.

    Every fit aims at what the teacher has at that place, on the student's own input, so later ones repair what
    earlier ones broke. Of adjacent blocks that go, the last one's place stands for all. With no `forms`, a student
    that blocks were taken out of already is realigned.
    """
    way = find_way(teacher, blocks, data)
    start = min((way.blocks.index(name) for name in forms), default=0)
    if realign and start and gap_behind(way, start - 1, forms):
        start -= 1
    walk = Walk(teacher, student, way, data, start)
    if not forms:
        walk.changed, walk.student = True, visits(student, walk.name, data)
    stand_for = way.one_for_a_span(forms)
    found: list[BlockFit] = []
    layers: list[LayerFit] = []
    home, more = device_of(student), True
    while more:
        name = walk.name
        block, own = teacher.get_submodule(name), student.get_submodule(name)
        outputs: list[Tensor] | None = None
        with data.stream.weights(block), data.stream.weights(own, changed=True):
            if name in forms:
                place = place_of(student, name, walk.student)
                made, result, outputs = fit_block(place, stand_for[name], block, walk.teacher, walk.student, rank)
                put_(student, name, made)
                found.append(result)
                walk.changed = True
            elif realign and type(block).__name__ == type(own).__name__:  # a graph is of a class of its own
                gap = gap_behind(way, walk.at, forms)
                outputs, fits = _realign(own, block, walk, teacher, gap)
                walk.changed = walk.changed or bool(fits)
                layers += fits
            if progress is not None:
                progress(name)
            more = walk.advance(outputs)
        student.get_submodule(name).to(home)
    if realign:
        layers += realign_head_(student, teacher, way, data)
    return Fitted(tuple(found), tuple(layers))


def place_of(student: nn.Module, name: str, visits: list[Visit]) -> Place:
    """What is known of a block before it goes."""
    block = student.get_submodule(name)
    arguments = fewest(visits)
    structure = understand(block, arguments)
    if not structure.keeps_shape:
        raise ReplearnError(
            f"{name} turns {tuple(arguments.x.shape)} into {structure.trace.shape}; only blocks that keep the "
            "shape can go. Leave it out."
        )
    return Place(name, block, structure)


def fewest(visits: list[Visit]) -> Arguments:
    """The call on the smallest batch, for tracing a block; of one sample only where there are no others."""
    return min(visits, key=lambda visit: (len(visit.kept.x) == 1, visit.kept.x.numel())).arguments


def _realign(
    block: nn.Module, untouched: nn.Module, walk: Walk, teacher: nn.Module, gap: Sequence[str]
) -> tuple[list[Tensor] | None, list[LayerFit]]:
    """Solve a kept block's layers again; in a transformer the last one stands in for a gap behind it.

    Queries and keys are not solved again, so the blocks behind a gap need the input that they know. Convolutional
    blocks do not: all their layers are solved, and they repair a gap better by themselves.
    """
    if not walk.changed and not gap:
        return None, []
    structure, held = understand(block, fewest(walk.student)), holders(walk.models[1])
    alone = {path for path, layer in block.named_modules() if held[id(getattr(layer, "weight", None))] == 1}
    aims = {path: tap for path, tap in aims_of(structure).items() if path in alone}
    end = structure.sums[-1].key if structure.kind == "transformer" else None
    last = [layer.path for layer in structure.layers if layer.path in aims and layer.sum == end is not None]
    if not walk.changed:
        aims = {path: aims[path] for path in last}
    if not aims:
        return None, []
    outputs, values = teacher_values(untouched, walk.teacher, list(aims.values()))
    if gap and last:
        far = beyond(teacher, gap, passed_on(untouched, walk.teacher, outputs), structure.after)
        if far is None and not walk.changed:
            return outputs, []
        for found, value in zip(values, far or (), strict=bool(far)):
            found[aims[last[0]]] = value
    return outputs, realign_block_(block, structure, walk.student, aims, values, walk.name)


def gap_behind(way: Way, at: int, forms: Mapping[str, Form]) -> list[str]:
    """The blocks right behind one that go and leave nothing; of adjacent ones the last one's form counts."""
    behind = takewhile(lambda name: name in forms and name in way.follows, way.blocks[at + 1 :])
    gap = [] if way.blocks[at] in forms else list(behind)
    return gap if gap and forms[gap[-1]] == "removal" else []


def beyond(
    teacher: nn.Module, gap: Sequence[str], calls: list[Visit], after: tuple[str, ...] | None
) -> list[Tensor] | None:
    """What the untouched network has at the last sum of a gap; None where something else follows that sum."""
    for name in gap[:-1]:
        block = teacher.get_submodule(name)
        with calls[0].stream.weights(block):
            calls = passed_on(block, calls)
    block = teacher.get_submodule(gap[-1])
    with calls[0].stream.weights(block):
        structure = understand(block, fewest(calls))
        if not structure.sums or after is None or structure.after != after:
            return None
        behind = [block.get_submodule(step) for step in after if not step.startswith("=")]
        if any(True for module in behind for _ in module.parameters()):
            return None
        end = Tap(structure.sums[-1].key)
        return [found[end] for found in teacher_values(block, calls, [end])[1]]


def realign_head_(student: nn.Module, teacher: nn.Module, way: Way, data: Data) -> list[LayerFit]:
    """Solve the last linear layer behind the blocks again, towards the teacher's outputs of it."""
    name = head_of(teacher, way, data)
    if not name:
        return []
    layer, untouched = student.get_submodule(name), teacher.get_submodule(name)
    given = [visits(model, name, data) for model in (teacher, student)]
    site, fits = Layer("0", ("linear", 0), 0), []
    with data.stream.weights(layer, changed=True), data.stream.weights(untouched):
        for own, aim in zip(parts(layer), parts(untouched), strict=True):
            fitted, held = Moments(), Moments()
            for seen, now in zip(*given, strict=True):
                for a, b in rows(own, now.arguments.x, aim(seen.arguments.x), tokens=now.tokens):
                    (held if now.held_out else fitted).add(a, b)
            fits.append(solve_layer_(nn.Sequential(own), site, fitted, held, name))
    return fits


def parts(layer: nn.Module) -> list[nn.Linear]:
    """A layer of many outputs as several of fewer, with the same weights."""
    weights, found = dict(layer.named_parameters()), []
    for at in range(0, len(weights["weight"]), OUTPUTS):
        part = nn.Linear(1, 1, bias="bias" in weights, device="meta")
        for name, value in weights.items():
            setattr(part, name, nn.Parameter(value[at : at + OUTPUTS], requires_grad=False))
        found.append(part)
    return found


def head_of(model: nn.Module, way: Way, data: Data) -> str:
    """The last linear layer that runs once behind the blocks, with a weight of its own; '' where there is none."""
    last, ran = way.blocks[-1], []
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or name == last]
    run_noting(model, names, data, lambda name, *_: ran.append(name))
    behind = ran[ran.index(last) + 1 :]
    if not behind or behind.count(behind[-1]) > 1:
        return ""
    return behind[-1] if holders(model)[id(model.get_submodule(behind[-1]).weight)] == 1 else ""
