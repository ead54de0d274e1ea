"""Benchmark files in a report: each kind has its tables and figures, and stands beside the paper's rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from replearn.experiments.report.benchmarks import measured_in
from replearn.experiments.report.chart import Case, Dot, dot_figure
from replearn.experiments.report.collecting import Other, Reader, collect
from replearn.experiments.report.page import page
from replearn.experiments.report.svg import standalone_svg

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    known, rest = measured_in(collect(RESULTS).others)
    assert [why for _, why in rest if why.startswith("looks")] == []  # nothing of a known kind is off its form
    return {entry.path.stem: entry for entry in known}


def kind_of(data: Any) -> tuple[list[Any], list[Any]]:
    return measured_in([Other(path=Path("some/file.json"), data=data)])


def test_every_committed_file_has_a_table_and_a_figure(measured: dict[str, Any]) -> None:
    assert {"steps_h200", "steps_methods_vit_h200", "inference_h200"} <= measured.keys()
    for entry in measured.values():
        assert len({tuple(each.cells) for each in entry.ratios}) == 1  # the same columns in every row
        assert "H200" in entry.made_on
        assert "nan" not in standalone_svg(entry.figure)


def test_the_numbers_are_the_files_own(measured: dict[str, Any]) -> None:
    data = json.loads((RESULTS / "steps_h200.json").read_text())
    first = {row["label"]: row for row in data["training"][0]["rows"]}
    lines = {each.label: each.cells for each in reversed(measured["steps_h200"].ratios)}
    assert lines["RepL"]["time"].startswith(f"{first['RepL']['time']['median']:.3f} [")
    assert (lines["RepL"]["verdict"], lines["RepL"]["paper: time"]) == ("better", "0.785")
    assert lines["removal"]["memory"] == f"{first['removal']['memory_ratio']:.3f}"
    ours = [each for each in measured["inference_h200"].ratios if each.paper]
    assert {each.cells["table"] for each in ours} == {"tab:dynamic_vs_deploy", "tab:bp_vs_repl_deploy"}


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
    far = Dot(value=5.0, low=-100.0, high=100.0, role="repl", tip="x")
    drawing = dot_figure(
        [Case(label="h" * 90), Case(label="l" * 90, dots=(far,))],
        name="d",
        title="t",
        about="a",
        x_title="x",
        rule=(1.0, "E2E"),
    )
    text = standalone_svg(drawing)
    xs = [float(x) for points in re.findall(r'points="([^"]*)"', text) for x in re.findall(r"(\S+),", points)]
    assert min(xs) >= 0
    assert max(xs) <= drawing.width
    assert all(len(words) <= 47 for words in re.findall(r"<text[^>]*>([^<]*)<", text))
