"""The door `fit`: put something in the place of every block that goes, and realign what stays, in one walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from ..operators._base.ridge import Moments
from ..surgery.hidden_states import record_replacement
from ..surgery.replace import set_submodule
from .batches import Data
from .calls import Arguments, argument_of
from .corrections import adopt_attributes_
from .layers import LayerFit, aims_of, realign_block_, solve_layer_, teacher_values
from .rows import rows
from .stand_ins import BlockFit, Form, Place, fit_block
from .structure import Layer, understand
from .walking import Visit, Walk, Way, find_way, visits

Progress = Callable[[str], None]


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
    walk = Walk(teacher, student, way, data, start)
    if not forms:
        walk.changed, walk.student = True, visits(student, walk.name, data)
    found: list[BlockFit] = []
    layers: list[LayerFit] = []
    while True:
        name = walk.name
        block = teacher.get_submodule(name)
        outputs: list[Tensor] | None = None
        if name in forms:
            place = place_of(student, name, walk.student, way)
            following = way.blocks[walk.at + 1] if walk.at + 1 < len(way.blocks) else ""
            inner = following in forms and following in way.follows
            form = "removal" if inner else forms[name]
            made, result, outputs = fit_block(place, form, block, walk.teacher, walk.student, rank)
            set_submodule(student, name, adopt_attributes_(made, place.block))
            record_replacement(student, place.block, made)
            found.append(result)
            walk.changed = True
        elif walk.changed and realign and type(block) is type(student.get_submodule(name)):
            outputs, fits = _realign(student.get_submodule(name), block, walk, name)
            layers += fits
        if progress is not None:
            progress(name)
        if not walk.advance(outputs):
            break
    if realign:
        layers += realign_head_(student, teacher, way, data)
    return Fitted(tuple(found), tuple(layers))


def place_of(student: nn.Module, name: str, visits: list[Visit], way: Way) -> Place:
    """What is known of a block before it goes."""
    block = student.get_submodule(name)
    arguments = fewest(visits)
    structure = understand(block, arguments)
    if not structure.keeps_shape:
        raise ReplearnError(
            f"{name} turns {tuple(arguments.x.shape)} into {structure.trace.shape}; only blocks that keep the "
            "shape can go. Leave it out."
        )
    return Place(name, block, structure, argument_of(block, arguments), structure.trace.length)


def fewest(visits: list[Visit]) -> Arguments:
    """The call on the smallest batch, for tracing a block; of one sample only where there are no others."""
    return min((visit.arguments for visit in visits), key=lambda given: (len(given.x) == 1, given.x.numel()))


def _realign(
    block: nn.Module, untouched: nn.Module, walk: Walk, name: str
) -> tuple[list[Tensor] | None, list[LayerFit]]:
    structure = understand(block, fewest(walk.student))
    aims = aims_of(structure)
    if not aims:
        return None, []
    outputs, values = teacher_values(untouched, walk.teacher, list(aims.values()))
    return outputs, realign_block_(block, structure, walk.student, aims, values, name)


def realign_head_(student: nn.Module, teacher: nn.Module, way: Way, data: Data) -> list[LayerFit]:
    """Solve the last linear layer behind the blocks again, towards the teacher's outputs of it."""
    name = head_of(teacher, way, data)
    if not name:
        return []
    layer = student.get_submodule(name)
    fitted, held = Moments(), Moments()
    for batch in data.batches:
        aim = seen_at(teacher, name, data, batch)[1]
        given = seen_at(student, name, data, batch)[0]
        for x, y in rows(layer, given, aim):
            (held if batch.held_out else fitted).add(x, y)
    site = Layer("0", ("linear", 0), 0, 0)
    return [solve_layer_(nn.Sequential(layer), site, fitted, held, name)]


def head_of(model: nn.Module, way: Way, data: Data) -> str:
    """The last linear layer that runs once behind the blocks, with a weight of its own; '' where there is none."""
    ran: list[str] = []
    handles = []
    shared: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            shared[id(parameter)] = shared.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or name == way.blocks[-1]:

            def note(module: nn.Module, args: Any, made: Any, name: str = name) -> None:
                ran.append(name)

            handles.append(module.register_forward_hook(note))
    try:
        data.run(model, min(data.batches, key=lambda batch: batch.size))
    finally:
        for handle in handles:
            handle.remove()
    behind = ran[ran.index(way.blocks[-1]) + 1 :]
    if not behind or behind.count(behind[-1]) > 1:
        return ""
    return behind[-1] if shared[id(model.get_submodule(behind[-1]).weight)] == 1 else ""


def seen_at(model: nn.Module, name: str, data: Data, batch: Any) -> tuple[Tensor, Tensor]:
    """What a layer is given and makes, in a run of the model on a batch."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: Any, made: Any) -> None:
        seen.append((args[0].detach().clone(), made.detach().clone()))

    handle = model.get_submodule(name).register_forward_hook(note)
    try:
        data.run(model, batch)
    finally:
        handle.remove()
    return seen[-1]
