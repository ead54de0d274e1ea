"""Many runs compiled in one process: torch.compile gives a class of models up after a few, and only logs it."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")

from torch._dynamo import config
from torch._dynamo.utils import counters

from replearn.experiments.bench.steps import precision_of
from replearn.experiments.training.fit import fit
from replearn.experiments.training.recipe import Recipe, Variant
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.step import many_graphs, not_compiled

VARIANTS = (
    Variant(label="E2E", method="e2e"),
    Variant(label="removal", method="removal", interval=2),
    Variant(label="RepL", method="repl", interval=2),
)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch):
    """A limit of one graph, and a compiler that does not compile: it counts."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    with config.patch(recompile_limit=1):
        yield
    torch._dynamo.reset()


def test_every_run_of_a_comparison_is_compiled_and_no_evaluation_is(few, tmp_path: Path) -> None:
    recipe = Recipe(
        name="tiny",
        table="",
        model="cifar_resnet:20:4",
        data=("digits",),
        variants=VARIANTS,
        epochs=1,
        batch_size=400,
        compile=True,
    )
    graphs = []
    for seed in (0, 1):
        for variant in VARIANTS:
            spec = RunSpec(
                recipe=recipe, variant=variant, data="digits", seed=seed, out=tmp_path / f"{variant.label}{seed}"
            )
            (result,) = fit([spec], device="cpu")
            assert result.finished
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 3, 3, 3, 3]  # one for each method, and another seed's model runs the same
    assert counters["frames"]["total"] == counters["frames"]["ok"]  # none was given up
    assert config.recompile_limit == 1


def test_compiled_steps_have_room_too(few) -> None:
    with precision_of("compiled"):
        assert config.recompile_limit > 100
    with precision_of("bf16"):
        assert config.recompile_limit == 1
    with config.patch(recompile_limit=10_000), many_graphs():
        assert config.recompile_limit == 10_000  # a user's own limit, where it is larger


def test_what_is_not_compiled_runs_as_it_is_written(few) -> None:
    model = Twice()
    model.compile()
    with not_compiled(True):
        model(torch.ones(3, 2))
    assert counters["stats"]["unique_graphs"] == 0
    with not_compiled(False):
        model(torch.ones(3, 2))
    assert counters["stats"]["unique_graphs"] == 1
