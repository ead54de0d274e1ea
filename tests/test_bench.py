"""`replearn bench`: candidates in turns, ratios within a round, and files that say how."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from typing import Any

import narrow
import pytest
import torch
from typer.testing import CliRunner

from replearn import ReplearnError
from replearn.cli.app import app
from replearn.cli.commands.bench import case_of
from replearn.experiments.bench import timing
from replearn.experiments.bench.cases import (
    CASES,
    E2E,
    REMOVAL,
    REPL,
    Case,
    candidates,
)
from replearn.experiments.bench.record import new_record, record_json, training_table
from replearn.experiments.bench.steps import TrainingStep, compare_steps, precision_of
from replearn.experiments.bench.timing import Timing, interleave, ratio
from replearn.operators import NoWeights

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")
TINY = Case(model="cifar_resnet:20:4", batch_size=2, size=8, interval=2)


def test_every_round_runs_every_candidate_and_the_order_rotates() -> None:
    order: list[str] = []
    bodies = {name: lambda name=name: order.append(name) for name in "abc"}
    found = interleave(bodies, CPU, rounds=3, inner=2, warmup=0)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb"
    assert {name: len(timing.milliseconds) for name, timing in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_runs_before_and_in_the_lead_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    bodies = {name: lambda name=name: order.append(name) for name in "ab"}
    monkeypatch.setattr(timing, "elapsed", lambda body, device, inner: order.append("timed") or float(inner))
    found = interleave(bodies, CPU, rounds=1, inner=3, warmup=1, lead=2)
    assert order == ["a", "b", "a", "a", "timed", "b", "b", "timed"]
    assert {timing.milliseconds for timing in found.values()} == {(1.0,)}  # of one run
    with pytest.raises(ReplearnError, match="lead=-1"):
        interleave(bodies, CPU, lead=-1)


def test_ratios_are_taken_round_by_round() -> None:
    base = Timing(milliseconds=(1.0, 10.0, 2.0))
    half = Timing(milliseconds=(0.5, 5.0, 1.0))
    found = ratio(half, base)
    assert (found.median, found.low, found.high) == (0.5, 0.5, 0.5)
    uneven = ratio(Timing(milliseconds=(1.0, 2.0, 3.0, 4.0, 10.0)), Timing(milliseconds=(1.0,) * 5))
    assert (uneven.median, uneven.low, uneven.high) == (3.0, 2.0, 4.0)
    with pytest.raises(ReplearnError, match="Only timings of the same rounds"):
        ratio(Timing(milliseconds=(1.0,)), base)


@pytest.mark.parametrize(("bodies", "rounds", "says"), [({}, 1, "nothing to time"), ({"a": print}, 0, "rounds=0")])
def test_what_cant_be_timed_is_refused(bodies: Any, rounds: int, says: str) -> None:
    with pytest.raises(ReplearnError, match=says):
        interleave(bodies, CPU, rounds=rounds)


@pytest.fixture(scope="module")
def comparison() -> Any:
    sides = candidates(TINY, extra=(NoWeights(),))
    return compare_steps(TINY, "tf32", CPU, sides=sides, rounds=2, inner=1)


def test_a_comparison_has_every_side_and_what_the_arithmetic_allows(comparison: Any) -> None:
    labels = [row.label for row in comparison.rows]
    assert labels == [E2E, REMOVAL, REPL, "RepL, no_weights"]
    e2e, removal, repl = comparison.rows[:3]
    assert comparison.eta == pytest.approx(0.5)  # one convolution of two
    assert removal.flops < repl.flops < e2e.flops
    assert removal.parameters < repl.parameters < e2e.parameters
    expected = (1 - repl.time.median) / ((1 - removal.time.median) * 0.5)
    assert comparison.yield_ is None or comparison.yield_ == pytest.approx(expected)
    assert e2e.time.median == 1.0


def test_builds_are_made_in_another_order_each_and_their_rounds_count_together() -> None:
    sides, said = candidates(TINY)[:3], list[str]()
    found = compare_steps(TINY, "tf32", CPU, sides=sides, rounds=2, inner=1, builds=2, say=said.append)
    built = [words.split("building ")[1] for words in said if "building " in words]
    assert built == [E2E, REMOVAL, REPL, REMOVAL, REPL, E2E]
    assert sum("timing, about " in words for words in said) == 2
    assert [row.label for row in found.rows] == [E2E, REMOVAL, REPL]
    assert all(len(row.timing.milliseconds) == 4 for row in found.rows)
    with pytest.raises(ReplearnError, match="builds=0"):
        compare_steps(TINY, "tf32", CPU, sides=sides, builds=0)


def test_weights_given_learn_as_synthesized_ones_and_frozen_ones_do_not() -> None:
    found = run_path(str(BENCHMARKS / "synthesis.py"))
    sides = {side.label: side for side in found["sides_of"](TINY)}
    with precision_of("tf32"):
        steps = {label: TrainingStep(TINY, side, "tf32", CPU) for label, side in sides.items()}
        for step in steps.values():
            step()
    # the same first losses after warm-up steps in which only RepL changes its coefficients
    assert torch.allclose(steps[found["GIVEN"]].loss, steps[found["FROZEN"]].loss)
    assert torch.isfinite(steps[REPL].loss)


def test_the_record_says_how_it_was_measured_and_makes_the_readmes_table(comparison: Any, tmp_path: Path) -> None:
    record = new_record("replearn bench steps", CPU, rounds=2, inner=1, training=[comparison])
    record_json(record, tmp_path / "deep" / "bench.json")
    data = json.loads((tmp_path / "deep" / "bench.json").read_text())
    assert data["format"] == "replearn-bench-1"
    assert data["command"] == "replearn bench steps"
    assert data["hardware"]["device"] == "cpu"
    assert len(data["training"][0]["rows"][0]["timing"]["milliseconds"]) == 2
    assert "eta 0.500" in training_table(comparison)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words])


def test_a_title_names_no_first_target_that_differs_from_stack_to_stack() -> None:
    case = Case(model="cifar_resnet:26:8", batch_size=8)
    assert case.title == "cifar_resnet:26:8, batch 8 of 32x32"
    assert (
        Case(model="cifar_resnet:26:8", batch_size=8, first=4).title
        == "cifar_resnet:26:8, first=4, batch 8 of 32x32"
    )


def test_steps_from_the_command_line(tmp_path: Path) -> None:
    words = "steps cifar_resnet:20:4 --interval 2 --size 8 --batch-size 2 --rounds 1 --inner 1 --backend bf16"
    done = run(*words.split(), "--builds", "2", "--operators", "no_weights", "-o", str(tmp_path / "b.json"))
    assert done.exit_code == 0, done.output
    assert "RepL, no_weights" in done.output
    assert "cifar_resnet:20:4, first=2, batch 2 of 8x8; bf16" in done.output
    kept = json.loads((tmp_path / "b.json").read_text())
    assert kept["training"][0]["backend"] == "bf16"
    assert kept["builds"] == 2


def test_a_cpu_is_given_little_to_do_with_large_images_unless_more_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replearn.experiments.bench.cases.SMALL_SUITE", (replace(TINY, size=72),))
    assert run("steps", "--device", "cpu", "--backend", "tf32", "-o", str(tmp_path / "b.json")).exit_code == 0
    kept = json.loads((tmp_path / "b.json").read_text())
    assert (kept["rounds"], kept["inner"]) == (5, 1)
    assert kept["training"][0]["notes"] == ["a CPU has no TF32: the step ran in float32"]
    assert case_of("torchvision:efficientnet_b0", 4, None, None, None, CPU).batch_size == 4


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    """Run a script of benchmarks/ in this process."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    run_path(str(BENCHMARKS / name), run_name="__main__")


def test_epochs_are_timed_by_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "demo --methods e2e,repl --rounds 1 --together 2 --set model=cifar_resnet:20:4 --set batch_size=512"
    script(monkeypatch, "epochs.py", *words.split(), "--out", str(tmp_path / "e.json"))
    rows = json.loads((tmp_path / "e.json").read_text())["epochs"][0]["rows"]
    assert [row["label"] for row in rows] == ["E2E", "RepL", "E2E, 2 seeds together"]
    assert rows[2]["images_per_second_in_all"] == pytest.approx(2 * rows[2]["images_per_second"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "steps resnet32 --backend fp8",
            "--backend fp8: There is no backend 'fp8'; there are tf32, bf16, captured, compiled",
        ),
        (
            "steps demo",
            "demo is a recipe. Write its model, cifar_resnet:26:8 (for 3 channels; digits has 1).",
        ),
        ("steps cifar_resnet:20:4 --size 8 --first 4", "has no targets"),
        ("stepps resnet20", "Did you mean 'steps'?"),
    ],
)
def test_bad_input_is_told_in_one_line(words: str, says: str) -> None:
    done = run(*words.split())
    assert done.exit_code == 2
    assert says in done.output


def test_the_readmes_tables_are_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python benchmarks/readme_tables.py` writes them."""
    script(monkeypatch, "readme_tables.py", "--check")


def test_methods_of_the_trainer_and_the_papers_bottleneck_are_rows_by_name() -> None:
    words = "steps vit:16:4:2:4 --size 8 --batch-size 2 --rounds 1 --inner 1 --backend bf16 --json"
    named = "--method checkpointing --methods skip_attention,stochastic_depth"
    done = run(*words.split(), *named.split())
    assert done.exit_code == 0, done.output
    rows = {row["label"]: row for row in json.loads(done.stdout)["training"][0]["rows"]}
    assert list(rows)[-3:] == ["checkpointing", "skip_attention", "stochastic_depth"]
    assert rows["checkpointing"]["parameters"] == rows["E2E"]["parameters"] != rows["skip_attention"]["parameters"]
    narrow.register()
    words = "--interval 2 --size 32 --batch-size 2 --rounds 1 --inner 1 --backend tf32 --operators bottleneck"
    done = run("steps", "torchvision:resnet_narrow_bottleneck", *words.split(), "--method", "skip_attention")
    assert done.exit_code == 0, done.output
    assert "RepL, bottleneck" in done.output
    assert "note: skip_attention: Narrow is not a timm VisionTransformer" in done.output
    assert {"resnet152", "vit_tiny_16"} <= {case.model for case in CASES}


def test_stochastic_depth_draws_again_before_each_step() -> None:
    (side,) = [side for side in candidates(TINY, methods=("stochastic_depth",)) if side.method]
    drawn = []
    side.method.start_step = lambda model, epoch, step: drawn.append((epoch, step))
    step = TrainingStep(TINY, side, "tf32", CPU)
    step()
    assert drawn == [(0, number) for number in range(4)]
    assert not side.capturable
