"""Fit operators to the blocks of a trained model, in closed form, on a few batches."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..blocks.running import unchanged
from ..blocks.stacks import find_stacks
from ..errors import ReplearnError
from ..operators._base.options import Correction, Options, ReadingOptions
from ..operators.no_weights import NoWeights
from ..operators.whole_block import WholeBlock
from ..planning.data import Plan
from ..planning.table import text_table
from ..planning.targets import build_target
from ..planning.validate import ordinary_tensors
from ..surgery.hidden_states import record_replacement
from ..surgery.plan_metadata import attach_plan_
from ..surgery.replace import check_fit, restored_on_error, set_submodule, warn_of_optimizers
from .closed_form import Fit as Fit
from .closed_form import Imitation, check_data
from .observe import Forward as Forward


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `calibrate_` did, target by target; `print` shows a table."""

    fits: tuple[Fit, ...]
    num_samples: int

    def __str__(self) -> str:
        rows = [(f.name, f"{f.error:.3f}", f"{f.removal_error:.3f}", f"{f.ridge:.0e}", f.note) for f in self.fits]
        head = ("module", "error", "removal", "ridge", "note")
        return "\n".join([f"fitted on {self.num_samples} samples", "", *text_table(head, rows, right=(1, 2, 3))])


@ordinary_tensors()
def calibrate_(
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    *,
    correction: Correction = "full",
    forward: Forward | None = None,
) -> Calibration:
    """Replace the planned blocks of a trained model by operators fitted to imitate them; no gradient step.

    `correction` is added to operators that have none, because the neighbours' weights alone explain next to
    nothing of a trained block: 'full' is the most accurate, 'low-rank' has fewer parameters, 'none' fits the
    plan's operators as they are. The run time is the plain operator's. The model gets the plan with corrections.

    `data` is a list or loader of batches, iterated over once per target; each is a tensor, a tuple of arguments, a
    dict of keywords, or what `forward(model, batch)` takes. Later fits see earlier replacements. Every fifth batch
    is held out: it chooses the ridge and gives the errors in the report, which are never above removal's. Padding
    in an `attention_mask` is ignored. Warns of optimizers as `replace_` does.

    Raises ReplearnError, with the model unchanged, for data that does not fit the model or gives NaN.
    """
    check_data(data)
    check_fit(model, plan)
    plan = with_corrections(model, plan, correction)
    warn_of_optimizers(model, plan)
    fits, samples = [], 0
    blocks = {target.name: model.get_submodule(target.name) for target in plan.targets}
    with restored_on_error(model, plan), unchanged(model):
        for target in plan.targets:
            imitation = Imitation(model, target, data, forward)
            fits.append(imitation.fit())
            check_finite(imitation)
            samples = imitation.samples
            set_submodule(model, target.name, imitation.operator)
            record_replacement(model, blocks[target.name], imitation.operator)
        attach_plan_(model, plan)
    for name, block in blocks.items():
        model.get_submodule(name).train(block.training)
    return Calibration(tuple(fits), samples)


def with_corrections(model: nn.Module, plan: Plan, correction: Correction) -> Plan:
    """The plan with corrections for operators that read neighbours and have none.

    A whole block with full corrections would be the block itself: it gets a scale and a shift for every channel.
    """
    stacks = {stack.name: stack for stack in find_stacks(model)}
    targets = []
    for target in plan.targets:
        options = target.operator
        if correction != "none" and isinstance(options, ReadingOptions) and options.correction == "none":
            whole = isinstance(options, WholeBlock)
            corrected: Options = NoWeights() if whole else replace(options, correction=correction)
            if target.anatomy.kind in corrected.kinds:
                built = build_target(model, stacks[target.stack], target.position, corrected)
                target = replace(built, notes=(*target.notes, f"{correction} correction, for a trained model"))
        targets.append(target)
    pairs = zip(targets, plan.targets, strict=True)
    added = sum(new.parameters_after - old.parameters_after for new, old in pairs)
    return replace(plan, targets=tuple(targets), parameters_after=plan.parameters_after + added)


def check_finite(imitation: Imitation) -> None:
    """Refuse a fit with inf or NaN, which finite activations give if their squares overflow."""
    for path, tensor in imitation.operator.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ReplearnError(
                f"{imitation.target.name} can't be fitted: its {path} would be inf or NaN, because "
                "activations are too large to be squared. Check that the batches are scaled as in training."
            )
