"""Every method by its name in the tables: from a trained network and unlabelled samples to a smaller network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from latency import interleaved
from practise import practise
from subjects import Subject
from torch import Tensor, nn
from training_free import own_span, reestimate_, removal, replace_me

from replearn.compression import compress

FITTED = 2048  # samples for closed forms; healing takes all
Suits = Literal["all", "convolutional", "transformers"]


@dataclass(frozen=True)
class Budget:
    """What training may take: seconds in all, epochs, or steps of PRACTISE; and what is known by then."""

    seconds: float | None = None
    epochs: float = 0.0
    steps: int = 2000
    rate: float = 0.0  # PRACTISE's
    fit_seconds: float = 0.0  # what the method took without training, which is part of its seconds


@dataclass(frozen=True)
class Method:
    """`ours`: replearn's. `trains`: takes gradient steps. `of`: the method that it trains on from.

    `fewer`: takes out only as many blocks as make it as fast as the richest form with all of them out.
    `chooses`: takes out as many blocks as the others, and chooses them itself.
    """

    name: str
    run: Callable[[Subject, Tensor, Budget], nn.Module]
    ours: bool = False
    trains: bool = False
    suits: Suits = "all"
    of: str = ""
    fewer: bool = False
    chooses: bool = False

    def fits(self, subject: Subject) -> bool:
        return self.suits == "all" or (self.suits == "convolutional") == subject.convolutional


def ours(
    form: Any, *, realign: bool = True, heal: bool = False, chooses: bool = False
) -> Callable[[Subject, Tensor, Budget], nn.Module]:
    def run(subject: Subject, samples: Tensor, budget: Budget) -> nn.Module:
        given: Any = budget.epochs or None
        if heal and budget.seconds is not None:
            given = f"{max(budget.seconds - budget.fit_seconds, 0.01):.3f}s"
        small = compress(
            subject.model,
            list(samples.split(250)),
            budget=f"blocks={len(subject.out)}" if chooses else list(subject.out),
            form=form,
            realign=realign,
            augment=subject.augment,
            heal=given,
            samples=min(len(samples), FITTED),
        )
        made: nn.Module = small.model
        return made

    return run


def trained_by_practise(subject: Subject, samples: Tensor, budget: Budget) -> nn.Module:
    return practise(subject, samples, budget.rate, steps=budget.steps, seconds=budget.seconds)


def all_methods() -> dict[str, Method]:
    forms: list[tuple[str, Any, Suits]] = [
        ("realigned removal", "removal", "all"),
        ("rank 8", "low-rank", "all"),
        ("full", "full", "all"),
        ("half block", "mlp", "transformers"),
    ]
    found = [
        Method("removal", lambda subject, samples, budget: removal(subject)),
        Method(
            "removal, BatchNorm re-estimated",
            lambda subject, samples, budget: reestimate_(removal(subject), samples),
            suits="convolutional",
        ),
        Method("ReplaceMe", lambda subject, samples, budget: replace_me(subject, samples)),
        Method(
            "ReplaceMe, BatchNorm re-estimated",
            lambda subject, samples, budget: reestimate_(replace_me(subject, samples), samples),
            suits="convolutional",
        ),
        Method(
            "ReplaceMe, the span it chooses",
            lambda subject, samples, budget: replace_me(own_span(subject, samples), samples),
            suits="transformers",
        ),
        Method(
            "removal, BatchNorm re-estimated, fewer out",
            lambda subject, samples, budget: reestimate_(removal(subject), samples),
            suits="convolutional",
            fewer=True,
        ),
        Method("ReplaceMe, fewer out", lambda subject, samples, budget: replace_me(subject, samples), fewer=True),
        *(Method(name, ours(form), ours=True, suits=suits) for name, form, suits in forms),
        Method("realigned removal, fewer out", ours("removal"), ours=True, fewer=True),
        Method("realigned removal, own choice", ours("removal", chooses=True), ours=True, chooses=True),
        Method("PRACTISE", trained_by_practise, trains=True),
        Method("PRACTISE, own choice", trained_by_practise, trains=True, suits="convolutional", chooses=True),
        Method("PRACTISE, fewer out", trained_by_practise, trains=True, fewer=True),
        Method("removal, healed", ours("removal", realign=False, heal=True), trains=True, of="removal"),
        *(
            Method(f"{name}, healed", ours(form, heal=True), True, True, suits, of=name)
            for name, form, suits in forms
        ),
        Method(
            "realigned removal, fewer out, healed",
            ours("removal", heal=True),
            ours=True,
            trains=True,
            of="realigned removal, fewer out",
            fewer=True,
        ),
        Method(
            "realigned removal, own choice, healed",
            ours("removal", heal=True, chooses=True),
            ours=True,
            trains=True,
            of="realigned removal, own choice",
            chooses=True,
        ),
    ]
    return {method.name: method for method in found}


def fewer_out(subject: Subject, samples: Tensor, tolerance: float = 1.02) -> tuple[str, ...]:
    """As few of the blocks, evenly spread, as must go for removal to be as fast as the richest form.

    The richest form is 'full' for convolutional networks and 'mlp' for transformers, with all of the blocks out.
    Its weights don't matter here: it is fitted to few samples.
    """
    form: Any = "full" if subject.convolutional else "mlp"
    rich = compress(subject.model, samples[:8], budget=list(subject.out), form=form, realign=False).model
    total = len(subject.out)
    parts = [tuple(subject.out[at * total // number] for at in range(number)) for number in range(1, total + 1)]
    nets = [removal(subject.taking_out(part)) for part in parts]
    limit, *times = interleaved([rich, *nets], samples[:64])
    return next((part for part, now in zip(parts, times, strict=True) if now <= limit * tolerance), parts[-1])
