"""Adaptive replacement (tab:adaptive_repl): which blocks are replaced is chosen anew in every epoch.

    sum_i m_i = |F|,  m = the |F| legal blocks with the highest score, no two adjacent

|F| is the number of targets of the fixed placement. The score is the cosine similarity of a block's output
to its input, on one training batch, with every block in its place; it is compared over the whole
model, as the paper's sum is. Every legal block has an operator and all blocks stay trainable, so the
saving is in time and activations, not in parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....blocks.stacks import Stack, find_stacks
from ....fitting.observe import block_similarity
from ....planning.data import Plan, Target
from ....planning.legality import Survey
from ....planning.planner import count_parameters, plan
from ....planning.positions import best_nonadjacent
from ....planning.targets import build_operator, trainable
from ....surgery.plan_metadata import attach_plan_
from ....surgery.replace import set_submodule
from .base import Method
from .wrapping import Patch, patches, unpatch_

HOLDER = "replearn_operators"


class Adaptive(Method):
    name = "adaptive"
    has_targets = True
    leaves_idle = True
    changes_model = True

    _fixed: Plan
    _stacks: tuple[Stack, ...]

    def prepare(self, model: nn.Module) -> nn.Module:
        """Give every legal block an operator; until the first score the fixed targets are replaced."""
        variant = self.setting.variant
        self._fixed = plan(model, variant.interval, variant.begin, operator=variant.operator)
        self._stacks = find_stacks(model)
        survey = Survey(model, self._stacks, variant.operator)
        legal = [target for stack in self._stacks for target in survey.at(stack, survey.legal(stack))]
        built = [build_operator(model, target) for target in legal]
        holder = Operators()
        for operator in built:
            if all(parameter.device.type != "meta" for parameter in operator.parameters()):
                operator.reset_parameters()
            block = model.get_submodule(operator.target.name)
            key = operator.target.name.replace(".", "/")  # a module's name may not contain dots
            holder[key] = operator.train(block.training)
            Switch(block, holder, key, operator.target)
        model.add_module(HOLDER, holder)
        self._choose(model, {target.name for target in self._fixed.targets}, "as fixed")
        return model

    def start_epoch(self, model: nn.Module, epoch: int, batch: Callable[[], Tensor]) -> bool:
        scores = agreed(self.scores(model, batch()))
        return self._choose(model, self.most_redundant(scores), f"by the scores of epoch {epoch}")

    def scores(self, model: nn.Module, batch: Tensor) -> dict[str, float]:
        """The similarity of each legal block's output to its input; first puts every block in its place."""
        switches = list(patches(model, Switch))
        for switch in switches:
            switch.replaced = False
        inputs = {switch.target.name: switch.target.anatomy.input for switch in switches}
        with torch.compiler.set_stance("force_eager"):  # compiled code would not call the hooks that score
            return block_similarity(model, inputs, batch)

    def most_redundant(self, scores: Mapping[str, float]) -> set[str]:
        """The highest total score, in as many blocks as the fixed placement has, no two adjacent."""
        names = [name for stack in self._stacks for name in stack.blocks]
        return best_nonadjacent(names, scores, len(self._fixed.targets))

    def state(self) -> dict[str, Any]:
        return {"replaced": [] if self.plan is None else [target.name for target in self.plan.targets]}

    def load_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        self._choose(model, set(state["replaced"]), "as in the checkpoint")

    def finish(self, model: nn.Module) -> nn.Module:
        """Replace the blocks chosen last: the result is an ordinary replaced model, for save and deploy."""
        switches = list(patches(model, Switch))
        unpatch_(model, Switch)
        for switch in switches:
            if switch.replaced:
                set_submodule(model, switch.target.name, switch.operator)
        if hasattr(model, HOLDER):
            delattr(model, HOLDER)
            if self.plan is not None:
                attach_plan_(model, self.plan)
        return model

    def _choose(self, model: nn.Module, names: set[str], how: str) -> bool:
        before = None if self.plan is None else {target.name for target in self.plan.targets}
        switches = list(patches(model, Switch))
        for switch in switches:
            switch.replaced = switch.target.name in names
        chosen = tuple(switch.target for switch in switches if switch.replaced)
        self.plan = chosen_plan(model, self._fixed, chosen, how)
        return before != names


class Operators(nn.ModuleDict):
    """Holds the operators of all legal blocks; in a model that is an nn.Sequential it does nothing."""

    def forward(self, x: Any) -> Any:
        return x


class Switch(Patch):
    """Runs the block, or the operator in its place."""

    def __init__(self, block: nn.Module, holder: nn.ModuleDict, key: str, target: Target) -> None:
        super().__init__(block)
        # not the operator itself: that would nest block, operator, neighbour, its operator and so on
        self._holder, self._key = holder, key
        self.target = target
        self.replaced = False

    @property
    def operator(self) -> nn.Module:
        return self._holder[self._key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.operator if self.replaced else self.run)(*args, **kwargs)


def chosen_plan(model: nn.Module, fixed: Plan, targets: tuple[Target, ...], how: str) -> Plan:
    """The plan that `finish` carries out for these targets."""
    holder = model.get_submodule(HOLDER)
    operators = trainable(holder.parameters())
    held = f"{fixed.parameters_before + operators:,} parameters"
    note = f"adaptive: while training, all blocks and {len(list(holder.children()))} operators are held ({held})"
    return replace(
        fixed,
        placement=f"{len(targets)} targets, {how}",
        targets=targets,
        skipped=(),
        parameters_after=count_parameters(model, targets)[1] - operators,
        notes=(*fixed.notes, note),
    )


def agreed(scores: dict[str, float]) -> dict[str, float]:
    """The mean over all processes, which have a batch each and must choose the same blocks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return scores
    on_gpu = torch.distributed.get_backend() == "nccl"
    total = torch.tensor(list(scores.values()), dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(total)
    return dict(zip(scores, (total / torch.distributed.get_world_size()).tolist(), strict=True))
