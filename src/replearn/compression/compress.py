"""The one call: take blocks out of a trained model, with as little harm as a few unlabelled samples allow."""

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
from .batches import Augment, Data, Forward, device_of, read, read_augment
from .choose import Choice, read_budget
from .corrections import FORMS, Form, pass_through, plain_, put_
from .fit import Fitted, Progress
from .heal import Healing, heal_, read_heal
from .measure import Agreement, Metric, Price, agreement, answers, example_of, outputs, read_metric
from .prices import Prices, eval_copy
from .recognise import Recognition, recognise
from .streaming import Stream, stream_to
from .trials import Search
from .walking import first_calls


@dataclass(frozen=True)
class Compressed:
    """A compressed model: `model` is an ordinary module; `print` shows what went, what it costs and keeps."""

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
    resident: int = 0  # bytes of weights on `device=`, the most at a time

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
    for name, quantity, unit, spelled in COLUMNS:
        costs = [cost.of(quantity) / unit for cost in (small.before, small.promised, small.after)]
        ratio = f"{costs[2] / costs[0]:.3f}" if costs[0] else ""
        rows.append((name, *(format(cost, spelled) for cost in costs), ratio))
    lines = [title, "", *text_table(("", "before", "promised", "measured", "ratio"), rows, right=(1, 2, 3, 4)), ""]
    blocks = [
        (shown(b.name), b.form, f"{b.error:.3f}", f"{b.ridge:.0e}" if b.ridge else "") for b in small.fitted.blocks
    ]
    lines += [*text_table(("gone", "in its place", "left unexplained", "ridge"), blocks, right=(2, 3)), ""]
    touched = sum(layer.touched for layer in small.fitted.layers)
    if small.fitted.layers:
        lines.append(f"realigned {touched} of {len(small.fitted.layers)} layers of kept blocks")
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
    """Take blocks out of a trained model and repair what is left, in closed form; the model is not touched.

    - `loader`: batches of tensors, pairs (x, y), dicts or Hugging Face batches; labels are not used. At most
      `samples` are read. `forward(model, batch)` for batches of another kind.
    - `budget`: 'latency<=75%', 'parameters<=60%', 'flops<=70%', 'blocks=12', a Plan, or a list of block names.
    - `form`: what stands in a block's place: 'removal', 'channels', 'low-rank', 'full', or for transformers 'mlp'
      and 'attention' (the half that is kept). 'auto' takes the form that keeps most, and under a budget of a
      quantity the better one of that and removal.
    - `metric(model)`: a number that is higher for better models; it then decides which blocks go.
    - `augment(x)`: random copies of images to fit on and to heal with; 'images' for random crops and flips.
    - `heal`: epochs, or seconds as '30s', of training towards the untouched model; both are on the device then.
    - `device`: where the work is done, if that is not where the model is: weights come there block by block,
      samples and activations batch by batch, and wait on the CPU. `offload`: a folder in which they wait instead.

    The result is in eval mode. Raises ReplearnError for a model without blocks, for no data, a single sample, NaN,
    and for a budget that can't be met, saying what can.
    """
    begin = time.perf_counter()
    refuse_wrapped(model)
    wanted = read_budget(budget)
    if form != "auto" and form not in FORMS:
        raise ReplearnError(f"form={form!r}: write 'auto' or one of {', '.join(map(repr, FORMS))}.")
    for name, number, least in (("samples", samples, 2), ("rank", rank, 1)):
        if not isinstance(number, int) or number < least:
            raise ReplearnError(f"{name}={number!r}: write a whole number of at least {least}.")
    if heal is not None:
        read_heal(heal)
    change = read_augment(augment)
    stream = stream_to(device, offload, device_of(model))
    notes = ["the model was in train mode; it was read in eval mode"] if model.training else []
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ReplearnError(f"{type(model).__name__} is on the meta device, without values: load its weights.")
    with unchanged(model), torch.autocast(device_of(model).type, enabled=False):
        data = read(
            loader, forward=forward, augment=change, samples=samples, heal=bool(heal), stream=stream, model=model
        )
        if metric is not None:
            metric = read_metric(metric, model)
        found = recognise(model, data)
        data = data.through(found.way.blocks)
        taught = outputs(model, data, data.held())
        prices = Prices(model, found, data, rank)
        search = Search(wanted, model, found, data, taught, prices, realign, rank, metric, progress)
        choice, trial = search.best(None if form == "auto" else form)
        student, forms, fitted = trial.student, trial.forms, trial.fitted
        notes += notes_on(fitted)
        healing = None
        if heal is not None:
            whole = replace(data, stream=Stream())
            with stream.weights(model), stream.weights(student, changed=True):
                healing = heal_(student, model, whole, found.way, heal=heal, augment=change, progress=progress)
        plain_(student)
        student.eval()
        refuse_saving_(
            student, "replearn.compression.ship(small, folder) writes the standard architecture where that is one."
        )
        return Compressed(
            model=student,
            removed=tuple(name for name in found.way.blocks if name in forms),
            num_blocks=len(found.blocks),
            fitted=fitted,
            before=trial.before,
            promised=prices.after(forms),
            after=trial.after,
            agreement=agreement(taught, answers(student, data, data.held())),
            removal=bare_removal(model, found, forms, data, taught),
            budget=budget if isinstance(budget, str) else f"{len(wanted.names)} named blocks",
            num_samples=data.num_samples,
            seconds=time.perf_counter() - begin,
            example=given_to(model, data),
            metric=None if metric is None else (metric(model), metric(student)),
            choice=choice,
            healing=healing,
            notes=tuple(notes),
            resident=stream.moved.most,
        )


def notes_on(fitted: Fitted) -> list[str]:
    """What the user should know about the fits."""
    thinned = [layer.name for layer in fitted.layers if layer.thinned]
    if not thinned:
        return []
    return [f"{len(thinned)} wide layers were realigned on a part of every sample's positions, as {thinned[0]}"]


@torch.no_grad()
def given_to(model: nn.Module, data: Data) -> Any:
    """Some samples as the model takes them, which of a batch only `forward` knows."""
    example = example_of(data)
    if data.forward is None:
        return example.inputs
    with first_calls(model, [""]) as calls:
        data.run(model, example)
    return next((call.kwargs or call.args for call in calls.values()), None)


@torch.no_grad()
def bare_removal(
    model: nn.Module, found: Recognition, forms: Mapping[str, Form], data: Data, taught: Sequence[torch.Tensor]
) -> Agreement:
    """How the model agrees with itself without these blocks, and nothing repaired."""
    bare = eval_copy(model, share=True)
    for block in found.blocks:
        if block.name in forms:
            put_(bare, block.name, pass_through(block.structure))
    try:
        return agreement(taught, answers(bare, data, data.held()))
    except ReplearnError:  # blown up
        return Agreement(float("inf"), 0.0, float("inf"))
