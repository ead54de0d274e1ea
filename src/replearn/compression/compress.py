"""The one call: take blocks out of a trained model, with as little harm as a few unlabelled samples allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..blocks.running import unchanged
from ..deployment.saving import refuse_saving_
from ..errors import ReplearnError
from ..planning.data import Plan
from ..planning.validate import own_copy, refuse_wrapped
from ..surgery.inference_mode import lasting
from ..surgery.replace import set_submodule
from .batches import Augment, Data, Forward, read
from .budget import Budget, read_budget
from .choose import Choice, check_names, choose
from .corrections import pass_through
from .fit import Fitted, fit_
from .heal import heal_, read_heal
from .measure import Agreement, Metric, agreement, costs, outputs
from .plain import plain_
from .prices import Prices
from .recognise import Recognition, recognise
from .report import Compressed
from .stand_ins import FORMS, Form

Progress = Callable[[str], None]


@lasting()
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
    augment: Augment | None = None,
    heal: Any = None,
    samples: int = 2048,
    plain: bool = True,
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
    - `augment(x)`: random copies of images to fit on; `heal`: epochs, or seconds as '30s', of training towards the
      untouched model.

    The result is in eval mode. Raises ReplearnError for a model without blocks, for no data, a single sample, NaN,
    and for a budget that can't be met, saying what can.
    """
    begin = time.perf_counter()
    refuse_wrapped(model)
    wanted = read_budget(budget)
    if form != "auto" and form not in FORMS:
        raise ReplearnError(f"form={form!r}: write 'auto' or one of {', '.join(map(repr, FORMS))}.")
    if heal is not None:
        read_heal(heal)
    data = read(loader, forward=forward, augment=augment, samples=samples)
    notes = ["the model was in train mode; it was read in eval mode"] if model.training else []
    with unchanged(model):
        found = recognise(model, data)
        taught = outputs(model, data, data.held())
        prices = Prices(model, found, data, rank)
        choice, trials = _choices(model, found, data, wanted, form, prices, metric, progress)
        best: tuple[float, nn.Module, dict[str, Form], Fitted] | None = None
        for forms in trials:
            student = eval_copy(model)
            fitted = fit_(
                student, model, forms, data, found.way.blocks, realign=realign, rank=rank, progress=progress
            )
            gap = agreement(taught, outputs(student, data, data.held())).divergence
            if best is None or gap < best[0]:
                best = (gap, student, forms, fitted)
        if best is None:
            raise ReplearnError("There is no form to fit.")  # pragma: no cover
        _, student, forms, fitted = best
        healing = None
        if heal is not None:
            healing = heal_(student, model, data, found.way, heal=heal, augment=augment, progress=progress)
        if plain:
            plain_(student)
        student.eval()
        refuse_saving_(
            student, "replearn.compression.ship(small, folder) writes the standard architecture where that is one."
        )
        before, after = costs([model, student], data)
        return Compressed(
            model=student,
            removed=tuple(name for name in found.way.blocks if name in forms),
            num_blocks=len(found.blocks),
            fitted=fitted,
            before=before,
            promised=prices.after(forms),
            after=after,
            agreement=agreement(taught, outputs(student, data, data.held())),
            removal=bare_removal(model, found, forms, data, taught),
            budget=str(budget) if isinstance(budget, str) else str(wanted),
            num_samples=data.num_samples,
            seconds=time.perf_counter() - begin,
            metric=None if metric is None else (metric(model), metric(student)),
            choice=choice,
            healing=healing,
            notes=tuple(notes),
        )


def _choices(
    model: nn.Module,
    found: Recognition,
    data: Data,
    wanted: Budget,
    form: Form | Literal["auto"],
    prices: Prices,
    metric: Metric | None,
    progress: Progress | None,
) -> tuple[Choice | None, list[dict[str, Form]]]:
    """What goes, and with which forms it is to be tried."""
    rich = richest(found)
    if wanted.names:
        check_names(wanted.names, found)
        forms: dict[str, Form] = {
            name: "removal" if name in wanted.removal else rich[name] if form == "auto" else form
            for name in wanted.names
        }
        return None, [forms]
    if wanted.quantity == "blocks":
        if wanted.blocks > len(found.candidates):
            raise ReplearnError(
                f"budget='blocks={wanted.blocks}': {found.model} has {len(found.blocks)} blocks, of which "
                f"{len(found.candidates)} can go; ask for blocks={len(found.candidates)} or fewer."
            )
        made = choose(
            model, found, data, quantity="blocks", metric=metric, progress=progress,
            enough=lambda names, _: len(names) >= wanted.blocks,
        )  # fmt: skip
        return made, [{step.name: rich[step.name] if form == "auto" else form for step in made.steps}]
    return _within(model, found, data, wanted, form, rich, prices, metric, progress)


def _within(
    model: nn.Module,
    found: Recognition,
    data: Data,
    wanted: Budget,
    form: Form | Literal["auto"],
    rich: Mapping[str, Form],
    prices: Prices,
    metric: Metric | None,
    progress: Progress | None,
) -> tuple[Choice, list[dict[str, Form]]]:
    """As many blocks as the budget of a quantity asks for, for every form that can meet it."""
    now = prices.now.of(wanted.quantity)
    limit = wanted.share * now
    tried: list[dict[str, Form]] = (
        [dict.fromkeys(found.candidates, "removal"), dict(rich)]
        if form == "auto"
        else [dict.fromkeys(found.candidates, form)]
    )

    def left(index: int, names: Sequence[str]) -> float:
        return prices.after({name: tried[index][name] for name in names}).of(wanted.quantity)

    least = [left(index, found.candidates) for index in range(len(tried))]
    able = [index for index in range(len(tried)) if least[index] <= limit]
    if not able:
        raise ReplearnError(
            f"{found.model} can't meet {wanted.quantity}<={wanted.share:.0%}: with all {len(found.candidates)} "
            f"blocks out that can go, {min(least) / now:.0%} is left. Ask for "
            f"{wanted.quantity}<={min(least) / now + 0.005:.0%} or more."
        )
    choice = choose(
        model, found, data, quantity=wanted.quantity, metric=metric, progress=progress,
        enough=lambda names, _: all(left(index, names) <= limit for index in able),
    )  # fmt: skip
    names = [step.name for step in choice.steps]
    trials = []
    for index in able:
        number = next(n for n in range(1, len(names) + 1) if left(index, names[:n]) <= limit)
        trials.append({name: tried[index][name] for name in names[:number]})
    return choice, trials


def richest(found: Recognition) -> dict[str, Form]:
    """The form that keeps most, by what a block computes."""
    return {block.name: "mlp" if block.structure.kind == "transformer" else "full" for block in found.blocks}


def eval_copy(model: nn.Module) -> nn.Module:
    made = own_copy(model)
    for module in made.modules():
        module.training = False
    return made


@torch.no_grad()
def bare_removal(
    model: nn.Module, found: Recognition, forms: Mapping[str, Form], data: Data, taught: Sequence[torch.Tensor]
) -> Agreement:
    """How the model agrees with itself without these blocks, and nothing repaired."""
    bare = eval_copy(model)
    for block in found.blocks:
        if block.name in forms:
            set_submodule(bare, block.name, pass_through(block.argument, block.structure.trace.length))
    try:
        return agreement(taught, outputs(bare, data, data.held()))
    except ReplearnError:  # blown up
        return Agreement(float("inf"), 0.0)
