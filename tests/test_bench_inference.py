"""`replearn bench inference`: one backend for all sides, equal outputs, the paper's values beside ours."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from replearn.cli.app import app
from replearn.experiments.bench import inference
from replearn.experiments.bench.inference import (
    PAPER_DYNAMIC,
    PAPER_E2E,
    Setting,
    header,
    line_of,
    measure,
    printed,
)
from replearn.experiments.bench.inference_sides import (
    BACKENDS,
    DEFAULT,
    DEPLOYED,
    DYNAMIC,
    E2E,
    Sides,
    make_sides,
    runner,
)
from replearn.experiments.bench.timing import Timing
from replearn.experiments.report.benchmarks import measured_in
from replearn.experiments.report.collecting import Other
from replearn.fast.graph_module import FlatGraph
from replearn.fast.graphs.replay import Replayed
from replearn.fast.inference import Autocast
from replearn.surgery.replace import operators_of

CPU = torch.device("cpu")
TINY = Setting(models=("cifar_resnet:20:4",), batches=(1, 2), backends=DEFAULT, size=8, rounds=2)
KINDS = (E2E, DYNAMIC, DEPLOYED)


@pytest.fixture(scope="module")
def sides() -> Sides:
    return make_sides("cifar_resnet:20:4", 8, CPU, first=2)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    kept: list[tuple[int, bool]] = []
    for made in measure(TINY, CPU):
        kept.append((len(made["rows"]), made["finished"]))
    assert kept == [(number, number == 6) for number in range(1, 7)]  # each row is told as it is measured
    return made


def test_every_backend_that_this_device_has_is_measured(found: dict[str, Any]) -> None:
    cells = [(row["model"], row["batch"], row["backend"]) for row in found["rows"]]
    name = "cifar_resnet:20:4"
    assert cells == [(name, batch, backend) for backend in ("fp32", "amp", "channels_last") for batch in (1, 2)]
    assert Setting().backends == DEFAULT == BACKENDS[:6]


def test_every_side_of_a_graph_backend_is_replayed(sides: Sides) -> None:
    images = torch.randn(2, 3, 8, 8)
    for backend, dtype in (("graph", None), ("amp+graph", torch.bfloat16), ("channels_last+graph", None)):
        built = sides.built(backend, KINDS, images)
        assert all(isinstance(side, Replayed) for side in built.values())
        assert sides.dtype_of(backend) is dtype
        assert all(isinstance(side.model, Autocast) == (dtype is not None) for side in built.values())
    compiled = sides.built("channels_last+compile+graph", (E2E, DEPLOYED), images)
    assert all(side.model._compiled_call_impl is not None for side in compiled.values())


def test_a_speedup_is_the_others_time_over_the_faster_ones(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {E2E: 6.0, DYNAMIC: 8.0, DEPLOYED: 2.0}

    def timed(bodies: dict[str, Any], *_: Any, **__: Any) -> dict[str, Timing]:
        return {kind: Timing(milliseconds=(times[kind],)) for kind in bodies}

    monkeypatch.setattr(inference, "interleave", timed)
    row = inference.row_of(sides, "net", 2, "fp32", Setting(size=8), CPU)
    assert {name: found["median"] for name, found in row["speedup"].items()} == {
        f"{DEPLOYED} against {E2E}": 3.0,
        f"{DEPLOYED} against {DYNAMIC}": 4.0,
    }


def test_a_row_has_all_sides_and_their_ratios(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        assert row["targets"] == "3 of 9"
        assert set(row["milliseconds"]) == set(KINDS)
        for times in row["milliseconds"].values():
            assert 0 < times["low"] <= times["median"] <= times["high"]
        assert row["paper"] == {}
        assert row["flat"]
    assert found["format"] == "replearn-bench-inference-1"
    assert found["hardware"]["threads"] == torch.get_num_threads()
    assert found["numbers"]["amp"] == "bfloat16"


def test_sides_differ_in_nothing_but_the_method(sides: Sides) -> None:
    images = torch.randn(2, 3, 8, 8)
    plain = sides.built("fp32", KINDS, images)
    norms = {kind: sum(isinstance(m, nn.BatchNorm2d) for m in side.modules()) for kind, side in plain.items()}
    assert norms[E2E] == norms[DEPLOYED] == 0  # folded on both sides
    assert norms[DYNAMIC] > 0
    assert len(list(operators_of(plain[DYNAMIC]))) == 3
    assert not list(operators_of(plain[DEPLOYED]))
    assert all(isinstance(side, Autocast) for side in sides.built("amp", (E2E, DEPLOYED), images).values())
    for side in sides.built("channels_last", KINDS, images).values():
        kernels = [p for p in side.parameters() if p.dim() == 4 and p.shape[-1] > 1 and p.shape[1] > 1]
        assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    with torch.no_grad():
        assert torch.equal(runner(sides.end_to_end, images)(), sides.end_to_end(images))


def test_the_papers_rows_stand_beside_the_same_setting() -> None:
    both = printed("resnet34", 64, "fp32")
    assert set(both) == {PAPER_DYNAMIC, PAPER_E2E}
    assert both[PAPER_E2E] == {"base": 9.931, "deployed": 7.858, "speedup": 1.264}
    assert printed("resnet34", 1, "fp32") == {}
    times = {kind: {"median": 1.5, "low": 1.0, "high": 2.0} for kind in (E2E, DEPLOYED)}
    row = {"model": "resnet34", "batch": 64, "backend": "fp32", "milliseconds": times}
    row |= {"speedup": {f"{DEPLOYED} against {E2E}": {"median": 1.25}}, "paper": {PAPER_E2E: {"speedup": 1.264}}}
    line = line_of(row, ["resnet34"])
    assert line.startswith("resnet34    64 fp32")
    long = "torchvision:efficientnet_b0"
    assert header([long, "resnet34"]).index("batch") == line_of({**row, "model": long}, [long]).index("64") - 3
    assert line.endswith("E2E 1.250 [paper 1.264]")


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "inference", *words], prog_name="replearn")


def test_a_backend_that_is_not_measured_here_is_told() -> None:
    for backends, told in (
        ("graph,amp+graph", "graph and fuse need a CUDA GPU"),
        ("amp+fuse,channels_last+fuse", "graph and fuse need a CUDA GPU"),
    ):
        words = f"--device cpu vit:16:4:2:4 --size 8 --batch-size 1 --backend {backends}"
        done = call(*words.split())
        assert done.exit_code == 2
        assert told in " ".join((done.output + done.stderr).split())


def test_small_models_are_timed_on_small_images_and_sizes_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[Setting] = []
    monkeypatch.setattr(inference, "measure", lambda setting, *rest: settings.append(setting) or [])
    for words in ("cifar_resnet:26:8", "vit_small_16", "resnet20 resnet34 --size 64"):
        assert call(*words.split(), "--device", "cpu").exit_code == 0
    assert [(setting.size, setting.batches) for setting in settings] == [(32, (1, 8)), (224, (1, 8)), (64, (1, 8))]
    assert "give --size" in " ".join(call("resnet20", "resnet34", "--device", "cpu").stderr.split())


def test_inference_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "inference.json"
    words = "--device cpu vit:16:4:2:4 --size 8 --batch-size 1 --backend fp32 --rounds 2 --out"
    done = call(*words.split(), str(file))
    assert done.exit_code == 0, done.output
    about, header, line, told = done.output.strip().splitlines()
    assert "its operators' sums merged into weights" in about
    assert header.startswith("model")
    assert line.startswith("vit:16:4:2:4")
    assert told.replace("\n", "") == str(file)
    data = json.loads(file.read_text())
    assert data["finished"]
    assert data["setting"]["batches"] == [1]
    assert data["rows"][0]["targets"] == "1 of 4"
    assert data["rows"][0]["flat"]


def test_inference_takes_the_flags_of_the_other_commands() -> None:
    words = "--device cpu cifar_resnet:32:4 --size 8 --batch-size 1 --backend fp32 --rounds 2 --interval 2"
    done = call(*words.split(), "--operator", "no_weights", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["setting"]["operator"] == "no_weights"
    assert data["rows"][0]["targets"] == "6 of 15"
    assert "cifar_resnet:32:4" in done.stderr


def test_both_sides_are_flat_or_neither(sides: Sides) -> None:
    images = torch.randn(2, 3, 8, 8)
    built = sides.built("fp32", (E2E, DEPLOYED), images)
    assert all(isinstance(side, FlatGraph) for side in built.values())
    bent = copy.deepcopy(sides.replaced)
    bent.fc = Bends().eval()
    odd = replace(sides, replaced=bent)
    assert not odd.traceable(images)
    assert not any(isinstance(side, FlatGraph) for side in odd.built("fp32", (E2E, DEPLOYED), images).values())


class Bends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_stopped_run_keeps_its_rows_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, row_of = [], inference.row_of

    def stopped(*args: Any) -> dict[str, Any]:
        if measured:
            raise KeyboardInterrupt
        measured.append(row_of(*args))
        return measured[0]

    monkeypatch.setattr(inference, "row_of", stopped)
    file = tmp_path / "inference.json"
    words = "--device cpu cifar_resnet:20:4 --size 8 --batch-size 1,2 --backend fp32 --rounds 2 --out"
    assert call(*words.split(), str(file)).exit_code != 0
    data = json.loads(file.read_text())
    assert not data["finished"]
    assert data["rows"] == json.loads(json.dumps(measured))
    (lines,) = measured_in([Other(path=file, data=data)])[0].values()
    assert {line["file"] for line in lines} == {f"{file.as_posix()}, stopped before its end"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--batch-size one", "--batch-size one: write whole numbers of at least 1"),
        ("--batch-size 0 cifar_resnet:20:4", "--batch-size 0: write whole numbers of at least 1"),
        ("--backend fp4 cifar_resnet:20:4", f"There is no backend 'fp4'; there are {', '.join(BACKENDS)}"),
        ("resnet33 --batch-size 1", "There is no model 'resnet33'"),
    ],
)
def test_what_cannot_be_measured_is_said(words: str, says: str) -> None:
    done = call("--device", "cpu", *words.split())
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())
