"""What synthesis costs in a training step: RepL beside RepL with its weights given, or frozen as constants.

    python benchmarks/synthesis.py resnet32 --backend captured --rounds 7 --inner 4 --out FILE

Against given weights RepL is slower by their synthesis; against frozen ones by their gradient, too. Backbones are
those of `replearn bench steps`, on a CPU its small ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from replearn.experiments.bench.cases import CASES, REPL, SMALL_SUITE, Candidate, candidates
from replearn.experiments.bench.record import new_record, record_json, training_table
from replearn.experiments.bench.steps import compare_steps
from replearn.experiments.bench.timing import ratio
from replearn.experiments.training.fit import device_named
from replearn.fast.synthesis.ahead import readers_in
from replearn.operators._base.mixture import Weights, compute_dtype, providing_weights
from replearn.operators._base.operator import ReadingOperator
from replearn.operators.functional import synthesize

GIVEN, FROZEN = "RepL, weights given", "RepL, weights frozen"


class Given:
    """The operators' weights, made once instead of for every step.

    As constants nothing learns from them; as leaves they have a gradient.
    """

    def __init__(self, model: nn.Module, *, learn: bool) -> None:
        self._model, self._learn = model, learn
        self._made: dict[int, Weights] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._made:  # not before: the first forward pass knows in which precision
            for reader in readers_in(self._model):
                made = {name: weight.detach().clone() for name, weight in weights_of(reader).items()}
                self._made[id(reader)] = {name: made[name].requires_grad_(self._learn) for name in made}
        for weight in (weight for own in self._made.values() for weight in own.values()):
            weight.grad = None
        with providing_weights(lambda: self._made):
            yield


def weights_of(reader: ReadingOperator) -> Weights:
    mixtures = reader.mixtures()
    first = next(mixture.tensors[0] for mixture in mixtures.values() if mixture is not None)
    return synthesize(mixtures, compute_dtype(first, reader.stored_dtype))


def sides_of(case: Any) -> list[Candidate]:
    sides = candidates(case)
    build = next(side.build for side in sides if side.label == REPL)
    sides.append(Candidate(label=GIVEN, build=partial(given, build, learn=True)))
    return [*sides, Candidate(label=FROZEN, build=partial(given, build, learn=False))]


def given(build: Callable[[], nn.Module], *, learn: bool) -> nn.Module:
    """The model, whose every forward pass is handed the weights."""
    model = build()
    forward, around = model.forward, Given(model, learn=learn)

    def inside(*inputs: Any) -> Any:
        with around():
            return forward(*inputs)

    model.forward = inside  # type: ignore[method-assign]
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--backend", default="captured", choices=["tf32", "bf16", "captured"])
    for name, value in (("rounds", 10), ("inner", 3), ("builds", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = device_named(options.device)
    cases = [case for case in CASES if case.model in options.models] if options.models else list(SMALL_SUITE)
    often = {"rounds": options.rounds, "inner": options.inner, "builds": options.builds}
    record = new_record(" ".join(["python", *sys.argv]), device, **often, training=[])
    for case in cases:
        found = compare_steps(case, options.backend, device, sides=sides_of(case), **often)
        timings = {row.label: row.timing for row in found.rows}
        costs = {name: str(ratio(timings[REPL], timings[name])) for name in (GIVEN, FROZEN)}
        print(training_table(found), *(f"over {name}: {cost}" for name, cost in costs.items()), "", sep="\n")
        record["training"].append(found)
        record_json(record, options.out)


if __name__ == "__main__":
    main()
