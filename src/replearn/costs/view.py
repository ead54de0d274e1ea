"""The printed view of predicted costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.table import shown, text_table

if TYPE_CHECKING:
    from .data import Cost, ModelCost, Promise


def promise_table(promise: Promise) -> str:
    """Before and after, quantity by quantity."""
    before, after = promise.before, promise.after
    rows = [
        _row("trainable parameters", before.total.trainable, after.total.trainable, count),
        _row("forward FLOPs", before.total.forward_flops, after.total.forward_flops, flops),
        _row("training FLOPs", before.total.training_flops, after.total.training_flops, flops),
        _row("  of these synthesis", before.total.synthesis_flops, after.total.synthesis_flops, flops),
        _row("activation memory", before.total.activation_bytes, after.total.activation_bytes, size),
        _row("gradients", before.total.gradient_bytes, after.total.gradient_bytes, size),
        _row("optimizer state", before.total.optimizer_bytes, after.total.optimizer_bytes, size),
        _row("memory in all", before.total.memory_bytes, after.total.memory_bytes, size),
        _row("peak memory", before.peak_bytes, after.peak_bytes, size),
    ]
    where = "no machine named"
    if promise.machine is not None:
        rows.append(_row("time of a step", before.total.seconds, after.total.seconds, duration))
        where = shown(promise.machine.name)
    title = f"predicted ({promise.precision}, {promise.optimizer}, {where})"
    return "\n".join([title, "", *text_table(("", "before", "after", "ratio"), rows, right=(1, 2, 3))])


def blocks_table(cost: ModelCost) -> str:
    """One line for each block of a model."""
    entries = [*((block.name, block.kind, block.cost) for block in cost.blocks), ("the rest", "", cost.rest)]
    rows = [
        (shown(name), shown(kind), count(c.trainable), flops(c.training_flops), size(c.activation_bytes), _time(c))
        for name, kind, c in entries
    ]
    head = ("block", "kind", "parameters", "training FLOPs", "activations", "time")
    return "\n".join(text_table(head, rows, right=(2, 3, 4, 5)))


def _row(name: str, before: float, after: float, spell: object) -> tuple[str, str, str, str]:
    if not callable(spell):
        raise TypeError(f"{spell!r} can't spell a number")
    return name, spell(before), spell(after), f"{after / before:.3f}" if before else ""


def _time(cost: Cost) -> str:
    return duration(cost.seconds) if cost.seconds else ""


def count(number: float) -> str:
    return f"{number:,.0f}"


def flops(number: float) -> str:
    return _scaled(number, 1000.0, ("", "K", "M", "G", "T", "P", "E"))


def size(number: float) -> str:
    return _scaled(number, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _scaled(number: float, step: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(number) < step:
            return f"{number:.4g} {unit}".rstrip()
        number /= step
    return f"{number:.4g} {units[-1]}"
