"""Graph passes for inference, one file each: rewrites of a flat fx graph, named after what they fuse or move.

A pass has `apply_(flat, context) -> int`, which rewrites the graph in place and returns the number of places;
`AFTER`, the names of passes that come before it; and `example()`, a model and its input that it rewrites.
Nodes that it makes carry `meta["value"]`, a meta tensor of the example's value, as `note_values_` writes it; those
whose weight autocast would cast carry `meta["cast"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ..graph_module import FlatGraph
from ..inlining import note_values_
from ._context import Context


def passes() -> Iterator[tuple[str, Any]]:
    """Every pass by name, in an order that follows AFTER."""
    names = [file.name for file in iter_modules(__path__) if not file.name.startswith("_")]
    modules = {name: import_module(f"{__name__}.{name}") for name in sorted(names)}
    for name in TopologicalSorter({name: module.AFTER for name, module in modules.items()}).static_order():
        yield name, modules[name]


def apply_passes_(flat: FlatGraph, context: Context) -> dict[str, int]:
    """Apply every pass in place; the number of places that each rewrote."""
    note_values_(flat, context.example, context.dtype)
    return {name: module.apply_(flat, context) for name, module in passes()}
