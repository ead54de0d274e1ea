"""The plan as a strip of blocks: kept, replaced, skipped; a hint on each says what it reads and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...blocks.stacks import find_stacks
from ...errors import ReplearnError
from ..training.architectures import architecture
from .scene import Box, Drawing, Mark, Text


class NoDraws(TorchFunctionMode):
    """Leaves out random starting values: on the meta device they load the compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "erfinv_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Block:
    name: str
    position: int  # 1-based in its stack
    parameters: int | None


@lru_cache(maxsize=64)
def blocks_of(model: str, classes: int = 10) -> Mapping[str, tuple[Block, ...]] | None:
    """Every block of a model by stack, built without weights; None where the model can't be built here."""
    for size in (32, 224):
        try:
            with torch.device("meta"), NoDraws():
                built = architecture(model, num_classes=classes, size=size)
            return {
                stack.name: tuple(
                    Block(name, position, sum(p.numel() for p in built.get_submodule(name).parameters()))
                    for position, name in enumerate(stack.blocks, start=1)
                )
                for stack in find_stacks(built)
            }
        except (ReplearnError, NotImplementedError, RuntimeError, ImportError):
            continue
    return None


NAME_WIDTH, WIDTH = 74.0, 390.0
ROW, GAP = 26.0, 2.0


def strip_figure(plan: Mapping[str, Any], model: str, label: str, name: str) -> Drawing | None:
    """One plan; None where it is not one. Of a model that can't be built, the blocks that the plan names."""
    try:
        targets = {target["name"]: target for target in plan["targets"]}
        skipped = {entry["name"]: entry for entry in plan["skipped"]}
        stacks = _touched(blocks_of(model) or {}, targets) or _named(plan)
        longest = max(len(blocks) for blocks in stacks.values())
        side = min(24.0, (WIDTH - NAME_WIDTH - 6) / longest - GAP)
        marks: list[Mark] = []
        for row, (stack, blocks) in enumerate(stacks.items()):
            y = 6 + ROW * row
            marks.append(Text(x=2, y=y + 15, text=shortened(stack), role="muted", size=11.5))
            for index, block in enumerate(blocks):
                x = NAME_WIDTH + index * (side + GAP)
                marks.append(_box(block, targets.get(block.name), skipped.get(block.name), x, y, side))
        height = 6 + ROW * len(stacks) + 20
        kinds = Counter(_operator(target) for target in targets.values())
        marks += _legend(height - 6, "removal" in kinds, bool(skipped))
        operators = ", ".join(f"{count} by {kind}" for kind, count in kinds.items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    share = f"{len(targets)} of {plan.get('num_blocks', '?')} blocks replaced"
    about = f"{share} ({plan.get('placement', '')}): {operators}."
    return Drawing(
        name=name, title=f"Plan of {label}", about=about, width=WIDTH, height=height, marks=tuple(marks)
    )


def _touched(
    stacks: Mapping[str, tuple[Block, ...]], targets: Mapping[str, Any]
) -> Mapping[str, tuple[Block, ...]]:
    """The stacks, if they hold every target: another version of a library may name blocks otherwise."""
    names = {block.name for blocks in stacks.values() for block in blocks}
    return stacks if stacks and targets.keys() <= names else {}


def _named(plan: Mapping[str, Any]) -> dict[str, tuple[Block, ...]]:
    """Only the blocks that the plan itself names: targets, their sources, what was skipped."""
    names: dict[str, dict[str, int]] = {}
    for target in plan["targets"]:
        held = names.setdefault(target["stack"], {})
        position = int(target["position"])
        for shift, name in ((-1, target["previous"]), (0, target["name"]), (1, target["next"])):
            held.setdefault(name, position + shift)
    return {
        stack: tuple(Block(name, position, None) for name, position in sorted(held.items(), key=lambda i: i[1]))
        for stack, held in names.items()
    }


def _box(
    block: Block,
    target: Mapping[str, Any] | None,
    skipped: Mapping[str, Any] | None,
    x: float,
    y: float,
    side: float,
) -> Box:
    lines = [f"{block.name} (position {block.position})"]
    if target is not None:
        sides: dict[str, list[str]] = {}
        for read in target["reads"]:
            sides.setdefault(read["side"], []).append(read["role"])
        removed = target["operator"]["name"] == "removal"
        lines.append("removed" if removed else f"replaced by {_operator(target)}")
        lines += [f"reads {', '.join(roles)} from {target[which]}" for which, roles in sides.items()]
        lines.append(f"{target['parameters_before']:,} parameters before, {target['parameters_after']:,} after")
        lines += list(target.get("notes", ()))[:3]
        role = "removal" if removed else "repl"
    elif skipped is not None:
        lines.append(f"kept, though its turn came: {skipped['reason']}")
        role = "skipped"
    else:
        lines.append("kept" if block.parameters is None else f"kept, {block.parameters:,} parameters")
        role = "kept"
    return Box(x=x, y=y, width=side, height=20, role=role, tip="\n".join(lines), focus=role != "kept")


def _operator(target: Mapping[str, Any]) -> str:
    options = target["operator"]
    extra = [
        str(options[key]) for key in ("sources", "correction") if options.get(key) not in (None, "both", "none")
    ]
    return str(options["name"]).replace("_", " ") + (f" ({', '.join(extra)})" if extra else "")


def _legend(y: float, removed: bool, skipped: bool) -> list[Mark]:
    gone = ("removal", "removed") if removed else ("repl", "replaced")
    entries: Sequence[tuple[str, str]] = [("kept", "kept"), gone]
    if skipped:
        entries = [*entries, ("skipped", "skipped")]
    marks: list[Mark] = []
    x = NAME_WIDTH
    for role, text in entries:
        marks.append(Box(x=x, y=y - 9, width=10, height=10, role=role))
        marks.append(Text(x=x + 15, y=y, text=text, role="muted", size=11))
        x += 34 + 6 * len(text)
    return marks


def shortened(name: str, most: int = 11) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]
