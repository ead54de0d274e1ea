"""`replearn.compress`: remove blocks from a trained model, with repairs fitted to a few unlabelled samples."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..blocks.running import unchanged
from ..deployment.saving import refuse_saving_
from ..errors import ReplearnError
from ..planning.data import Plan
from ..planning.table import shown, text_table
from ..planning.validate import ordinary_tensors, refuse_wrapped
from .batches import Augment, Data, Forward, as_augment, device_of, read
from .block_costs import BlockCosts, eval_copy
from .blockwise import first_calls
from .choose import Choice, read_budget
from .fit import Fitted, Progress
from .forms import FORMS, Form, identity_for, merge_corrections_, replace_block_
from .heal import Healing, heal_, read_heal
from .measure import Agreement, Metric, Price, agreement, example_of, iter_outputs, read_metric, stored_outputs
from .offload import Offloader, read_offloading
from .recognise import Recognition, recognise
from .search import Search


@dataclass(frozen=True)
class Compressed:
    """A compressed model: `model` is an ordinary module; `print` shows removed blocks, costs and agreement."""

    model: nn.Module = field(repr=False)
    removed: tuple[str, ...]
    num_blocks: int
    fitted: Fitted
    before: Price
    promised: Price
    after: Price
    agreement: Agreement
    removal: Agreement
    budget: str
    num_samples: int
    seconds: float
    example: Any = field(default=None, repr=False)  # some samples, as the model takes them
    metric: tuple[float, float] | None = None
    choice: Choice | None = None
    healing: Healing | None = None
    notes: tuple[str, ...] = ()
    resident: int = 0  # bytes of weights on `device=`, at the peak

    def __str__(self) -> str:
        return compressed_text(self)


COLUMNS = (
    ("latency, ms", "latency", 1e-3, ".2f"),
    ("FLOPs", "flops", 1, ".4g"),
    ("parameters", "parameters", 1, ",.0f"),
)


def compressed_text(small: Compressed) -> str:
    title = (
        f"{type(small.model).__name__}: {len(small.removed)} of {small.num_blocks} blocks out "
        f"({shown(small.budget)}), {small.num_samples} samples, {small.seconds:.1f} s"
    )
    rows = []
    for name, quantity, unit, format_ in COLUMNS:
        costs = [cost.of(quantity) / unit for cost in (small.before, small.promised, small.after)]
        ratio = f"{costs[2] / costs[0]:.3f}" if costs[0] else ""
        rows.append((name, *(format(cost, format_) for cost in costs), ratio))
    lines = [title, "", *text_table(("", "before", "promised", "measured", "ratio"), rows, right=(1, 2, 3, 4)), ""]
    blocks = [
        (shown(b.name), b.form, f"{b.error:.3f}", f"{b.ridge:.0e}" if b.ridge else "") for b in small.fitted.blocks
    ]
    lines += [*text_table(("gone", "in its place", "left unexplained", "ridge"), blocks, right=(2, 3)), ""]
    num_changed = sum(layer.touched for layer in small.fitted.layers)
    if small.fitted.layers:
        lines.append(f"realigned {num_changed} of {len(small.fitted.layers)} layers of kept blocks")
    if small.healing is not None:
        lines.append(str(small.healing))
    now, bare = small.agreement, small.removal
    same = f"same decision as the untouched model {now.same:.1%} (bare removal {bare.same:.1%}), divergence"
    same = "relative squared error" if math.isnan(now.same) else same
    lines.append(f"on held-out samples: {same} {now.divergence:.4f} ({bare.divergence:.4f})")
    if small.metric is not None:
        lines.append(f"metric {small.metric[0]:.4g} -> {small.metric[1]:.4g}")
    lines += [f"note  {shown(note)}" for note in small.notes]
    return "\n".join(lines)


@ordinary_tensors()
def compress(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    budget: str | Plan | Sequence[str],
    form: Form | Literal["auto"] = "auto",
    rank: int = 8,
    realign: bool = True,
    forward: Forward | None = None,
    metric: Metric | None = None,
    augment: Augment | Literal["images"] | None = None,
    heal: Any = None,
    samples: int = 2048,
    device: torch.device | str | None = None,
    offload: str | Path | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Remove blocks from a trained model and fit the rest to it in closed form; the model is not changed.

    - `loader`: batches of tensors, pairs (x, y), dicts or Hugging Face batches; labels are not used. At most
      `samples` are read. `forward(model, batch)` for batches of another kind.
    - `budget`: 'latency<=75%', 'parameters<=60%', 'flops<=70%', 'blocks=12', a Plan, or a list of block names.
    - `form`: what replaces a block: 'removal', 'channels', 'low-rank', 'full', or for transformers 'mlp' and
      'attention' (the half that is kept). 'auto' takes the most accurate form, and under a budget of a quantity
      the better one of that and removal.
    - `metric(model)`: a number that is higher for better models; it then decides which blocks are removed.
    - `augment(x)`: random copies of images to fit on and to heal with; 'images' for random crops and flips.
    - `heal`: epochs, or seconds as '30s', of training towards the given model; both are on the device then.
    - `device`: where to compute, if not on the model's device: weights are copied there block by block, samples
      and activations batch by batch; they are stored on the CPU, or with `offload` in that folder.

    The result is in eval mode. Raises ReplearnError for a model without blocks, for no data, a single sample, NaN,
    and for a budget that can't be met, saying what can.
    """
    begin = time.perf_counter()
    refuse_wrapped(model)
    goal = read_budget(budget)
    if form != "auto" and form not in FORMS:
        raise ReplearnError(f"form={form!r}: write 'auto' or one of {', '.join(map(repr, FORMS))}.")
    for name, number, least in (("samples", samples, 2), ("rank", rank, 1)):
        if not isinstance(number, int) or number < least:
            raise ReplearnError(f"{name}={number!r}: write a whole number of at least {least}.")
    if heal is not None:
        read_heal(heal)
    augment = as_augment(augment)
    offloader = read_offloading(device, offload, device_of(model))
    notes = ["the model was in train mode; it was read in eval mode"] if model.training else []
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ReplearnError(f"{type(model).__name__} is on the meta device, without values: load its weights.")
    with unchanged(model), torch.autocast(device_of(model).type, enabled=False):
        data = read(loader, forward=forward, augment=augment, samples=samples, heal=bool(heal),
                    offloader=offloader, model=model)  # fmt: skip
        if metric is not None:
            metric = read_metric(metric, model)
        found = recognise(model, data)
        data = data.offload_blocks(found.order.blocks)
        teacher_outputs = stored_outputs(model, data, data.held_out())
        block_costs = BlockCosts(model, found, data, rank)
        search = Search(goal, model, found, data, teacher_outputs, block_costs, realign, rank, metric, progress)
        choice, trial = search.search(None if form == "auto" else form)
        student, forms, fitted = trial.student, trial.forms, trial.fitted
        if thinned := [layer.name for layer in fitted.layers if layer.thinned]:
            part = "a part of every sample's positions"
            notes.append(f"{len(thinned)} wide layers were realigned on {part}, as {thinned[0]}")
        healing = None
        if heal is not None:
            local = replace(data, offloader=Offloader())
            with offloader.loaded(model), offloader.loaded(student, write_back=True):
                healing = heal_(student, model, local, found.order, heal=heal, augment=augment, progress=progress)
        merge_corrections_(student)
        student.eval()
        refuse_saving_(
            student, "replearn.compression.ship(small, folder) writes the standard architecture where that is one."
        )
        return Compressed(
            model=student,
            removed=tuple(name for name in found.order.blocks if name in forms),
            num_blocks=len(found.blocks),
            fitted=fitted,
            before=trial.before,
            promised=block_costs.predict(forms),
            after=trial.after,
            agreement=agreement(teacher_outputs, iter_outputs(student, data, data.held_out())),
            removal=bare_removal(model, found, forms, data, teacher_outputs),
            budget=budget if isinstance(budget, str) else f"{len(goal.names)} named blocks",
            num_samples=data.num_samples,
            seconds=time.perf_counter() - begin,
            example=saved_example(model, data),
            metric=None if metric is None else (metric(model), metric(student)),
            choice=choice,
            healing=healing,
            notes=tuple(notes),
            resident=offloader.transfers.peak,
        )


@torch.no_grad()
def saved_example(model: nn.Module, data: Data) -> Any:
    """Some samples as the model takes them; with a `forward`, the arguments that it passes."""
    example = example_of(data)
    if data.forward is None:
        return example.inputs
    with first_calls(model, [""]) as calls:
        data.run(model, example)
    return next((call.kwargs or call.args for call in calls.values()), None)


@torch.no_grad()
def bare_removal(
    model: nn.Module, found: Recognition, forms: Mapping[str, Form], data: Data, expected: Sequence[torch.Tensor]
) -> Agreement:
    """The agreement of the model without these blocks, with nothing fitted."""
    bare = eval_copy(model, share=True)
    for block in found.blocks:
        if block.name in forms:
            replace_block_(bare, block.name, identity_for(block.structure))
    try:
        return agreement(expected, iter_outputs(bare, data, data.held_out()))
    except ReplearnError:  # NaN or infinity
        return Agreement(float("inf"), 0.0, float("inf"))
