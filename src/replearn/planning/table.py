"""The printed view of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .data import Plan, Target


FEW = 3  # notes of one kind that are shown one by one


def plan_table(plan: Plan) -> str:
    """A plan as text: one line a target, then what was skipped, notes and totals."""
    rows = [
        (
            shown(target.name),
            str(target.position),
            target.operator.label(),
            sources_of(target),
            f"{target.parameters_before:,}",
            f"{target.parameters_after:,}",
            "" if target.parameters_deployed is None else f"{target.parameters_deployed:,}",
        )
        for target in plan.targets
    ]
    head = ("module", "position", "operator", "sources", "parameters", "training", "deployed")
    lines = [
        f"{shown(plan.model)}: {len(plan.targets)} of {plan.num_blocks} blocks replaced ({shown(plan.placement)})",
        "",
        *text_table(head, rows, right=(1, 4, 5, 6)),
        "",
    ]
    lines += [shown(f"note     {names}: {note}") for note, names in notes_of(plan.targets).items()]
    lines += [shown(f"note     {note}") for note in plan.notes]
    lines += [
        shown(f"skipped  {entry.name} (position {entry.position}): {entry.reason}") for entry in plan.skipped
    ]
    lines.append(_total("training", plan.parameters_before, plan.parameters_after, "trainable parameters"))
    if plan.deployed_before is not None and plan.deployed_after is not None:
        lines.append(_total("deployed", plan.deployed_before, plan.deployed_after, "parameters"))
    return "\n".join(lines)


def _total(when: str, before: int, after: int, what: str) -> str:
    return f"{when} {before:,} -> {after:,} {what} ({after / before - 1 if before else 0.0:+.1%})"


def notes_of(targets: Sequence[Target]) -> dict[str, str]:
    """Every note once, with the names of its targets; many tensors read from one side are joined to one note."""
    found: dict[str, list[str]] = {}
    for target in targets:
        notes = list(target.notes)
        for side, other in (("previous", "next"), ("next", "previous")):
            alike = [note for note in notes if f" comes from the {side} source alone" in note]
            if len(alike) > FEW:
                joined = f"tensors that have other shapes in the {other} block come from the {side} source alone"
                notes = [joined, *(note for note in notes if note not in alike)]
        for note in notes:
            found.setdefault(note, []).append(target.name)
    return {note: few(names) for note, names in found.items()}


def few(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sources_of(target: Target) -> str:
    """The neighbours that are read: `layer3.2 + layer3.4`, or `none`."""
    sides = {read.side for read in target.reads}
    names = [name for side, name in (("previous", target.previous), ("next", target.next)) if side in sides]
    return shown(" + ".join(names)) or "none"


def shown(text: str) -> str:
    """The text with control characters escaped: names in a plan from a file must not control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """A table as lines; the columns in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)]
