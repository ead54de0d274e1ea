"""Methods that run blocks differently, by patches on `forward` that rename nothing; combinations of methods."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from ....blocks.stacks import Stack, find_stacks
from ....errors import ReplearnError
from ....operators._base.operator import Operator
from ....operators.removal import Removal
from .base import Method, Setting


class Patch(ABC):
    """Replaces the `forward` of one module, and may call the previous one.

    It is set in the module's `__dict__` and refers to the module without being a submodule: no parameter is
    renamed, and after `deepcopy` and pickle the copy has a patch of the copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found = vars(module).get("forward")
        if found is not None and not isinstance(found, Patch):
            raise ReplearnError(
                f"The forward of a {type(module).__name__} was exchanged already, by something that is not "
                "replearn. Start from a model as its library builds it."
            )
        self.inner: Patch | None = found
        vars(module)["forward"] = self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward without this patch."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with this patch."""


Kind = TypeVar("Kind", bound=Patch)


def patches(model: nn.Module, kind: type[Kind]) -> Iterator[Kind]:
    """Every patch of this kind in the model, in the order of its modules."""
    for module in model.modules():
        yield from (patch for patch in patches_on(module) if isinstance(patch, kind))


def patches_on(module: nn.Module) -> Iterator[Patch]:
    """The patches on one module, the outermost first."""
    patch = vars(module).get("forward")
    while isinstance(patch, Patch):
        yield patch
        patch = patch.inner


def unpatch_(model: nn.Module, *kinds: type[Patch]) -> None:
    """Remove every patch of these kinds; other patches on the same modules stay."""
    for module in model.modules():
        kept = [patch for patch in patches_on(module) if not isinstance(patch, kinds)]
        for patch, below in zip(kept, [*kept[1:], None], strict=False):
            patch.inner = below
        if kept:
            vars(module)["forward"] = kept[0]
        elif isinstance(vars(module).get("forward"), Patch):
            del vars(module)["forward"]


class Wrapper(Method):
    """A method that only runs blocks differently; it is applied after one that replaces blocks."""

    @abstractmethod
    def wrap(self, model: nn.Module, stacks: tuple[Stack, ...]) -> nn.Module:
        """Patch blocks of these stacks, which were found before any block was replaced."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return self.wrap(model, whole_stacks(model, self.name))


def whole_stacks(model: nn.Module, name: str) -> tuple[Stack, ...]:
    """The stacks of a model without replaced blocks."""
    if any(isinstance(module, Operator) for module in model.modules()):
        raise ReplearnError(
            f"{name}: this {type(model).__name__} has replaced blocks already. Start from a fresh model and "
            f"write both methods in one, as 'repl+{name}'."
        )
    stacks = find_stacks(model)
    if not stacks:
        raise ReplearnError(
            f"{name}: {type(model).__name__} has no stack of blocks to work on. Give your block class a "
            "`replearn_anatomy`, or put at least three equal blocks into one nn.ModuleList."
        )
    return stacks


def is_removed(block: nn.Module) -> bool:
    """True for a removed block."""
    return isinstance(block, Operator) and isinstance(block.target.operator, Removal)


class Combined(Method):
    """Several methods in one, as `repl+checkpointing`; the one that replaces blocks is applied first."""

    def __init__(self, setting: Setting, parts: list[Method]) -> None:
        super().__init__(setting)
        self.parts = sorted(parts, key=lambda part: isinstance(part, Wrapper))
        self.name = "+".join(part.name for part in self.parts)
        self.capturable = all(part.capturable for part in parts)
        self.leaves_idle = any(part.leaves_idle for part in parts)
        deciding = [part.name for part in parts if not isinstance(part, Wrapper)]
        if len(deciding) > 1:
            raise ReplearnError(
                f"{self.name}: {deciding[0]} and {deciding[1]} both decide what the blocks are. Keep one; only "
                "methods that run blocks differently can be added to it, as in 'repl+checkpointing'."
            )
        if any(part.changes_model for part in parts):
            raise ReplearnError(
                f"{self.name}: {deciding[0]} changes the blocks between epochs, so nothing can be added to it. "
                f"Write '{deciding[0]}' alone."
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        # found now, because a stack can't be recognised any more once some of its blocks are replaced
        wraps = any(isinstance(part, Wrapper) for part in self.parts)
        stacks = whole_stacks(model, self.name) if wraps else ()
        for part in self.parts:
            model = part.wrap(model, stacks) if isinstance(part, Wrapper) else part.prepare(model)
        self.plan = self.parts[0].plan
        return model

    def start_step(self, model: nn.Module, epoch: int, step: int) -> None:
        for part in self.parts:
            part.start_step(model, epoch, step)

    def finish(self, model: nn.Module) -> nn.Module:
        for part in reversed(self.parts):
            model = part.finish(model)
        return model
