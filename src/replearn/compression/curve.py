"""What a model keeps as its blocks go one after another, against what it then costs; and the picture of it."""

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
from .compress import Compressed
from .corrections import Form
from .fit import fit_
from .matplotlib_figure import new_figure, save
from .measure import Metric, agreement, answers, costs, outputs
from .prices import eval_copy
from .recognise import recognise

FITTED = 128  # samples that every point is fitted on
GREY, BLUE, ORANGE = "#6b7280", "#1f5fa8", "#c2570c"


@dataclass(frozen=True, slots=True)
class Point:
    """A model with so many blocks out: milliseconds for the example batch, and what it keeps, in percent."""

    num_out: int
    latency: float
    kept: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order in which blocks go, the untouched model first; and the compressed model's own."""

    kept: str  # what the percentages are: accuracy, or agreement with the untouched model
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
    """Fit and time the model with ever more blocks out, at most `most` times, in the order that compress chose.

    Every point is fitted on a few samples and not realigned or healed; the chosen one is the model itself.
    `accuracy(model)` is in percent; without it the share of equal decisions on held-out samples is taken.
    """
    data = read(loader, forward=forward, samples=samples, model=model)
    few, held = subset(data, FITTED), data.held()
    taught = outputs(model, data, held)

    def kept(found: nn.Module) -> float:
        if accuracy is not None:
            return accuracy(found)
        alike = agreement(taught, answers(found, data, held))
        return 100 * (max(0.0, 1 - alike.divergence) if math.isnan(alike.same) else alike.same)

    points = [Point(0, small.before.latency * 1e3, kept(model))]
    names = [step.name for step in small.choice.steps] if small.choice is not None else []
    if names:
        blocks = recognise(model, few).way.blocks
        form = usual_form(small)
        for number in even(len(names), most):
            student = eval_copy(model)
            forms: dict[str, Form] = dict.fromkeys(names[:number], form)
            fit_(student, model, forms, few, blocks, realign=False)
            try:
                reached = kept(student)
            except ReplearnError:  # NaN
                reached = 0.0
            before, after = costs([model, student], data)  # in turns, since the machine may be busier than it was
            points.append(Point(number, small.before.latency * after.latency / before.latency * 1e3, reached))
            if progress is not None:
                progress(f"drawing: {number} of {len(names)} blocks out")
    chosen = Point(len(small.removed), small.after.latency * 1e3, kept(small.model))
    return Curve("accuracy" if accuracy else "agreement", tuple(points), chosen, small.budget)


def usual_form(small: Compressed) -> Form:
    """The form that most of the removed blocks have; removal inside a span stands for the span's map."""
    forms = Counter(fit.form for fit in small.fitted.blocks if fit.form != "removal")
    return forms.most_common(1)[0][0] if forms else "removal"


def even(length: int, most: int) -> list[int]:
    """At most so many numbers from 1 to the length, evenly spread, with the last."""
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
