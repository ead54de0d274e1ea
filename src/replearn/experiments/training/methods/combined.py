"""Several methods at once, applied in the order in which they are written: `repl+checkpointing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ....errors import ReplearnError
from .base import Method, Setting
from .wrapping import Wrapper, whole_stacks


class Combined(Method):
    def __init__(self, setting: Setting, parts: list[Method]) -> None:
        super().__init__(setting)
        self.name = "+".join(part.name for part in parts)
        self.parts = parts
        self.capturable = all(part.capturable for part in parts)
        self.leaves_idle = any(part.leaves_idle for part in parts)
        check_order(self.name, parts)

    def prepare(self, model: nn.Module) -> nn.Module:
        # found now, because a stack can't be recognised any more once some of its blocks are replaced
        wraps = any(isinstance(part, Wrapper) for part in self.parts)
        stacks = whole_stacks(model, self.name) if wraps else ()
        for part in self.parts:
            model = part.wrap(model, stacks) if isinstance(part, Wrapper) else part.prepare(model)
        self._take_plan()
        return model

    def start_epoch(self, model: nn.Module, epoch: int, batch: Callable[[], Tensor]) -> bool:
        changed = [part.start_epoch(model, epoch, batch) for part in self.parts]
        self._take_plan()
        return any(changed)

    def start_step(self, model: nn.Module, epoch: int, step: int) -> None:
        for part in self.parts:
            part.start_step(model, epoch, step)

    def state(self) -> dict[str, Any]:
        return {part.name: part.state() for part in self.parts}

    def load_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        for part in self.parts:
            part.load_state(model, state[part.name])
        self._take_plan()

    def finish(self, model: nn.Module) -> nn.Module:
        for part in reversed(self.parts):
            model = part.finish(model)
        return model

    def _take_plan(self) -> None:
        self.plan = next((part.plan for part in self.parts if part.plan is not None), None)


def check_order(name: str, parts: list[Method]) -> None:
    """One method at most decides what the blocks are, and it comes first."""
    deciding = [part for part in parts if not isinstance(part, Wrapper)]
    running = [part for part in parts if isinstance(part, Wrapper)]
    if len(deciding) > 1:
        raise ReplearnError(
            f"{name}: {deciding[0].name} and {deciding[1].name} both decide what the blocks are. Keep one; "
            "only methods that run blocks differently can be added to it, as in 'repl+checkpointing'."
        )
    if parts != [*deciding, *running]:
        better = "+".join(part.name for part in [*deciding, *running])
        raise ReplearnError(
            f"{name}: {deciding[0].name} decides what the blocks are, so it comes before methods that run them "
            f"differently. Write '{better}'."
        )
