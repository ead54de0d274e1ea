"""Quality against latency as blocks are removed one after another, as data and as a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ReplearnError
from .batches import Forward, read, subset
from .block_costs import eval_copy
from .compress import Compressed
from .fit import fit_
from .forms import Form
from .matplotlib_figure import new_figure, save
from .measure import Metric, agreement, costs, iter_outputs, stored_outputs
from .recognise import recognise

NUM_SAMPLES = 128  # to fit every point on
GREY, BLUE, ORANGE = "#6b7280", "#1f5fa8", "#c2570c"


@dataclass(frozen=True, slots=True)
class Point:
    """A model with so many blocks removed: milliseconds on the example batch, and quality in percent."""

    num_out: int
    latency: float
    kept: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The original model and models with ever more blocks removed; and the compressed model's point."""

    kept: str  # what the percentages are: accuracy, or agreement with the original model
    points: tuple[Point, ...]
    chosen: Point
    budget: str


def curve(
    model: nn.Module,
    loader: Iterable[Any],
    small: Compressed,
    *,
    accuracy: Metric | None = None,
    forward: Forward | None = None,
    samples: int = 2048,
    most: int = 8,
    progress: Callable[[str], None] | None = None,
) -> Curve:
    """Fit and time the model with ever more blocks removed, at most `most` times, in the order of compress.

    Points are fitted on a few samples, without realigning or healing; the chosen point is the compressed model.
    `accuracy(model)` is in percent; without it quality is the share of equal decisions on held-out samples.
    """
    data = read(loader, forward=forward, samples=samples, model=model)
    few, held_out = subset(data, NUM_SAMPLES), data.held_out()
    teacher_outputs = stored_outputs(model, data, held_out)

    def quality(found: nn.Module) -> float:
        if accuracy is not None:
            return accuracy(found)
        now = agreement(teacher_outputs, iter_outputs(found, data, held_out))
        return 100 * (max(0.0, 1 - now.divergence) if math.isnan(now.same) else now.same)

    points = [Point(0, small.before.latency * 1e3, quality(model))]
    names = [step.name for step in small.choice.steps] if small.choice is not None else []
    if names:
        blocks = recognise(model, few).order.blocks
        form = most_common_form(small)
        for number in evenly_spaced(len(names), most):
            student = eval_copy(model)
            forms: dict[str, Form] = dict.fromkeys(names[:number], form)
            fit_(student, model, forms, few, blocks, realign=False)
            try:
                reached = quality(student)
            except ReplearnError:  # NaN
                reached = 0.0
            before, after = costs([model, student], data)  # in turns, against noise of the machine
            points.append(Point(number, small.before.latency * after.latency / before.latency * 1e3, reached))
            if progress is not None:
                progress(f"drawing: {number} of {len(names)} blocks out")
    chosen = Point(len(small.removed), small.after.latency * 1e3, quality(small.model))
    return Curve("accuracy" if accuracy else "agreement", tuple(points), chosen, small.budget)


def most_common_form(small: Compressed) -> Form:
    """The most common form of the replacements; removal counts only if there are no others."""
    forms = Counter(fit.form for fit in small.fitted.blocks if fit.form != "removal")
    return forms.most_common(1)[0][0] if forms else "removal"


def evenly_spaced(length: int, most: int) -> list[int]:
    """At most so many evenly spaced numbers from 1 to the length, with the last."""
    return sorted({round(length * (number + 1) / min(most, length)) for number in range(min(most, length))})


def draw(found: Curve, *paths: str | Path) -> None:
    """Draw the curve with the chosen point marked, once for every file; ReplearnError without matplotlib."""
    figure = new_figure(5.6, 3.8)
    axes: Any = figure.subplots()
    first, *rest = found.points
    axes.plot(
        [p.latency for p in found.points], [p.kept for p in found.points], "o-", color=BLUE, ms=4, lw=1.2,
        label="as blocks go, quickly fitted" if rest else "untouched model",
    )  # fmt: skip
    for point in rest:
        axes.annotate(str(point.num_out), (point.latency, point.kept), (0, 5), textcoords="offset points",
                      fontsize=7, ha="center", color=GREY)  # fmt: skip
    axes.axhline(first.kept, color=GREY, lw=0.8, ls=":", zorder=0)
    axes.plot(found.chosen.latency, found.chosen.kept, "D", color=ORANGE, ms=8,
              label=f"chosen: {found.chosen.num_out} out ({found.budget})")  # fmt: skip
    axes.set_xlabel("latency of the example batch, ms")
    axes.set_ylabel("accuracy, %" if found.kept == "accuracy" else "same decision as the untouched model, %")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    for path in paths:
        save(figure, Path(path))
