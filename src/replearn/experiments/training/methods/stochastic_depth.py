"""Stochastic depth (Huang et al. 2016): each training step leaves out some blocks, for the whole batch.

    p_l = l / L * drop_rate                                      (linear decay, l = 1 ... L)
    H_l = relu(x + b_l / (1 - p_l) f_l(x)),  b_l = 0 with chance p_l, else 1

All blocks of all stacks count, in order. A block that changes the shape is never dropped. The branch
of a block that is kept is scaled up while training, so that evaluation needs no scaling. In a ResNet the
scale stands where the branch ends, before the addition; elsewhere the block's whole change of its input
is the branch.

Together with RepL an operator has its block's l and is dropped with the same probability. Removed blocks
count, and have nothing to drop.

The choice depends on (seed, epoch, step) alone. A dropped block's parameters get no gradient in that step, and so
neither weight decay nor momentum.
"""

from random import Random
from typing import Any

from torch import Tensor, nn

from ....blocks.anatomy import Anatomy, resolve
from ....blocks.stacks import Stack, class_path
from ....errors import ReplearnError
from ....operators._base.operator import Operator
from .base import Setting
from .wrapping import Patch, Wrapper, is_removed, patches, unpatch_


class StochasticDepth(Wrapper):
    name = "stochastic_depth"
    capturable = False
    leaves_idle = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        rate = setting.variant.drop_rate
        if type(rate) not in (int, float) or not 0 <= rate < 1:
            raise ReplearnError(
                f"drop_rate={rate!r}: the last block's chance of being dropped is a number from 0 up to, but not "
                "including, 1, as 0.1."
            )

    def wrap(self, model: nn.Module, stacks: tuple[Stack, ...]) -> nn.Module:
        places = [(stack, i) for stack in stacks for i in range(len(stack))]
        chances = chances_of(len(places), self.setting.variant.drop_rate)
        found = []
        for index, (stack, i) in enumerate(places):
            block = model.get_submodule(stack.blocks[i])
            # blocks that change the shape are never dropped; the first of a generic stack may be one
            may_drop = not stack.anatomies[i].transition and (i > 0 or stack.family != "generic")
            if may_drop and not is_removed(block):
                if not isinstance(block, Operator) and class_path(block) != stack.block_type:
                    raise ReplearnError(
                        f"stochastic_depth: {stack.blocks[i]} of this {type(model).__name__} is a "
                        f"{type(block).__name__} now, which hands more than its output to the next block and "
                        "can't be dropped. Write 'stochastic_depth' alone, or combine it with 'repl' or 'removal'."
                    )
                found.append((index, block, stack.anatomies[i]))
        if not found:
            raise ReplearnError(
                f"stochastic_depth: {type(model).__name__} has no block that keeps the shape of its input, so "
                "none can be dropped. Train it with another method."
            )
        for index, block, anatomy in found:
            Dropped(block, anatomy, index, chances[index], scale_end(block, anatomy, chances[index]))
        return model

    def start_step(self, model: nn.Module, epoch: int, step: int) -> None:
        blocks = list(patches(model, Dropped))
        drops = draw(self.setting.seed, epoch, step, {block.index: block.chance for block in blocks})
        for block in blocks:
            block.dropped = drops[block.index]

    def finish(self, model: nn.Module) -> nn.Module:
        unpatch_(model, Dropped, Scaled)
        return model


def chances_of(total: int, rate: float) -> list[float]:
    """p_l = l / L * rate for l = 1 ... L."""
    return [place / total * rate for place in range(1, total + 1)]


def draw(seed: int, epoch: int, step: int, chances: dict[int, float]) -> dict[int, bool]:
    """Which blocks are dropped in this step; the draw of one does not depend on which others there are."""
    numbers = Random(f"stochastic depth, seed {seed}, epoch {epoch}, step {step}")
    drawn = [numbers.random() for _ in range(max(chances, default=-1) + 1)]
    return {index: drawn[index] < chance for index, chance in chances.items()}


class Dropped(Patch):
    """Returns the input where the block is dropped, else runs it."""

    def __init__(self, block: nn.Module, anatomy: Anatomy, index: int, chance: float, scaled: bool) -> None:
        super().__init__(block)
        self.index, self.chance, self.dropped = index, chance, False
        self._scale = None if scaled else 1 / (1 - chance)  # None where the branch's end is scaled already
        self._input = anatomy.input
        self._as_tuple = anatomy.returns == "tuple"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs[self._input]
        if self.dropped and self.module.training:
            return (x,) if self._as_tuple else x
        made = self.run(*args, **kwargs)
        if self._scale is None or not self.module.training:
            return made
        return (
            (stretched(x, made[0], self._scale), *made[1:]) if self._as_tuple else stretched(x, made, self._scale)
        )


class Scaled(Patch):
    """Scales the end of a residual branch while its block trains."""

    def __init__(self, end: nn.Module, block: nn.Module, scale: float) -> None:
        super().__init__(end)
        self._block = block
        self._scale = scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.run(*args, **kwargs)
        return made * self._scale if self._block.training else made


def stretched(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x + scale (y - x): what a block changes, scaled."""
    if y.shape != x.shape:
        raise ReplearnError(
            f"stochastic_depth: a block turns the shape {tuple(x.shape)} into {tuple(y.shape)}, so it can't be "
            "dropped. Tell it by the `transition` of its class's replearn_anatomy."
        )
    return x + scale * (y - x)


def scale_end(block: nn.Module, anatomy: Anatomy, chance: float) -> bool:
    """Scale the last layer before the addition in a residual block whose activation comes after it.

    False where there is none.
    """
    if anatomy.kind not in ("basic", "bottleneck") or "norm" not in anatomy.parts:
        return False
    if isinstance(block, Operator):
        end = getattr(block, "norm", None)
    else:  # timm's squeeze-and-excite layer comes last
        end = getattr(block, "se", None) or resolve(block, anatomy.parts["norm"].path)
    if end is not None:
        Scaled(end, block, 1 / (1 - chance))
    return end is not None
