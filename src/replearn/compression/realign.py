"""The door `realign`: solve the linear layers of kept blocks again, towards the untouched network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from .layers import LayerFit, aim_tap, layer_moments, solve_layer_
from .structure import Layer, Structure
from .taps import Tap, tapped
from .walking import Visit


def teacher_values(
    block: nn.Module, visits: Sequence[Visit], taps: Sequence[Tap]
) -> tuple[list[Tensor], list[dict[Tap, Tensor]]]:
    """The outputs of an untouched block and its values at the taps, batch by batch."""
    outputs, values = [], []
    for visit in visits:
        made, found = tapped(block, visit.arguments, taps)
        if made is None:
            raise RuntimeError("the block ended before its output")
        outputs.append(made)
        values.append(found)
    return outputs, values


def aligned_layers(structure: Structure) -> list[Layer]:
    """The layers that are solved again: all but those that only say where attention looks."""
    return [layer for layer in structure.layers if not layer.feeds_attention]


def realign_block_(
    block: nn.Module,
    structure: Structure,
    student: Sequence[Visit],
    aims: Mapping[str, Tap],
    values: Sequence[Mapping[Tap, Tensor]],
    name: str,
) -> list[LayerFit]:
    """Solve a block's layers one after another; `aims` says where the teacher has what each layer should give."""
    fits = []
    for layer in aligned_layers(structure):
        if layer.path not in aims:
            continue
        tap = aims[layer.path]
        fitted, held = layer_moments(block, layer, student, lambda number, tap=tap: values[number][tap])  # type: ignore[misc]
        fits.append(solve_layer_(block, layer, fitted, held, f"{name}.{layer.path}"))
    return fits


def aims_of(structure: Structure) -> dict[str, Tap]:
    return {layer.path: aim_tap(layer) for layer in aligned_layers(structure)}
