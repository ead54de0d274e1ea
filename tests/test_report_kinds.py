"""Benchmark files in a report: each kind has its table, and stands beside the paper's rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs_made_up import RECIPE, run

from replearn.experiments.report.benchmarks import measured_in
from replearn.experiments.report.collecting import Other, Reader, collect
from replearn.experiments.report.figures import runs_figure
from replearn.experiments.report.page import page
from replearn.experiments.report.svg import standalone_svg
from replearn.experiments.training.compare import compare
from replearn.experiments.training.recipe import Variant

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    known, rest = measured_in(collect(RESULTS).others)
    assert [why for _, why in rest if why.startswith("looks")] == []  # nothing of a known kind is off its form
    return {entry.path.stem: entry for entry in known}


def kind_of(data: Any) -> tuple[list[Any], list[Any]]:
    return measured_in([Other(path=Path("some/file.json"), data=data)])


def test_every_committed_file_has_a_table(measured: dict[str, Any]) -> None:
    assert {"steps_h200", "steps_methods_vit_h200", "inference_h200"} <= measured.keys()
    for entry in measured.values():
        assert len({tuple(line) for line in entry.lines}) == 1  # the same columns everywhere
        assert "H200" in entry.made_on


def test_the_numbers_are_the_files_own(measured: dict[str, Any]) -> None:
    data = json.loads((RESULTS / "steps_h200.json").read_text())
    first = {row["label"]: row for row in data["training"][0]["rows"]}
    lines = {line["row"]: line for line in reversed(measured["steps_h200"].lines)}
    assert lines["RepL"]["time"].startswith(f"{first['RepL']['time']['median']:.3f} [")
    assert (lines["RepL"]["verdict"], lines["RepL"]["paper: time"]) == ("better", "0.785")
    assert lines["removal"]["memory"] == f"{first['removal']['memory_ratio']:.3f}"
    assert measured["steps_h200"].sentence == "RepL against E2E: better in 12"
    tables = {line["against"]: line["table"] for line in measured["inference_h200"].lines if line["paper"]}
    assert tables == {"RepL dynamic": "tab:dynamic_vs_deploy", "E2E": "tab:bp_vs_repl_deploy"}


@pytest.mark.parametrize(
    "data",
    [
        {"format": "replearn-bench-1", "training": [{}]},
        {"format": "replearn-bench-inference-1", "rows": [{"model": 3}]},
    ],
)
def test_a_file_that_only_looks_known_is_named_and_says_why(data: Any, tmp_path: Path) -> None:
    known, ((_, why),) = kind_of(data)
    assert known == []
    assert why.startswith("looks like ")
    (tmp_path / "odd.json").write_text(json.dumps(data))
    collection = Reader(tmp_path).read()
    assert f"looks like {why.split()[2]}" in page(collection, [])


def test_dots_stay_inside_and_long_names_are_cut() -> None:
    recipe = replace(RECIPE, variants=(Variant(label="l" * 90, method="e2e"),), paper=())
    (comparison,) = compare([run("l" * 90, seed, 90.0 + 5 * seed, recipe=recipe) for seed in range(3)])
    drawing = runs_figure(comparison, "r")
    text = standalone_svg(drawing)
    xs = [float(x) for points in re.findall(r'points="([^"]*)"', text) for x in re.findall(r"(\S+),", points)]
    assert min(xs) >= 0
    assert max(xs) <= drawing.width
    assert all(len(words) <= 47 for words in re.findall(r"<text[^>]*>([^<]*)<", text))
