"""Benchmark files in a report: each kind has its tables and figures, and stands beside the paper's rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replearn.experiments.report.benchmarks import command_of, measured_in
from replearn.experiments.report.chart import Case, Dot, dot_figure
from replearn.experiments.report.collecting import Other, Reader, collect
from replearn.experiments.report.comparisons import cost_of, summary
from replearn.experiments.report.page import page
from replearn.experiments.report.sections import Section, sections_of
from replearn.experiments.report.svg import standalone_svg

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
ROW: dict[str, Any] = {
    "model": "resnet34",
    "method": "RepL",
    "int8": "static",
    "images_per_second": {"float32": 100.0, "int8": 150.0},
    "int8_speedup": {"median": 1.5, "low": 1.4, "high": 1.6},
    "paper": {"int8_images_per_second": 249.975},
}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    known, rest = measured_in(collect(RESULTS).others)
    assert [why for _, why in rest if why.startswith("looks")] == []  # nothing of a known kind is off its form
    return {entry.path.stem: entry for entry in known}


def kind_of(data: Any) -> tuple[list[Any], list[Any]]:
    return measured_in([Other(path=Path("some/file.json"), data=data)])


def test_every_committed_file_has_a_table_and_a_figure(measured: dict[str, Any]) -> None:
    assert {
        "steps_h200",
        "epochs_tab_wikitext2",
        "inference_h200",
        "int8_throughput_cpu",
    } <= measured.keys()
    for entry in measured.values():
        assert entry.tables
        for _, columns in entry.tables:
            assert len({len(cells) for cells in columns.values()}) == 1
        assert entry.figures
        assert entry.command
        small = entry.path.stem.startswith("int8_")
        assert ("cpu" if small else "H200") in entry.made_on
        for drawing in entry.figures:
            assert "nan" not in standalone_svg(drawing)


def test_the_numbers_are_the_files_own(measured: dict[str, Any]) -> None:
    data = json.loads((RESULTS / "steps_h200.json").read_text())
    first = {row["label"]: row for row in data["training"][0]["rows"]}
    ((_, columns),) = measured["steps_h200"].tables
    line = {head: cells[0] for head, cells in columns.items()}
    assert line["RepL: time"] == f"{first['RepL']['time']['median']:.3f}"
    assert line["removal: memory"] == f"{first['removal']['memory_ratio']:.3f}"


def without_times(section: Section) -> Section:
    """As if all runs had shared their device."""
    if section.comparison is None:
        return section
    rows = tuple(replace(row, time_ratio=None) for row in section.comparison.rows)
    return replace(section, comparison=replace(section.comparison, rows=rows))


def test_a_time_of_a_benchmark_fills_in_where_a_comparison_has_none(measured: dict[str, Any]) -> None:
    sections = [without_times(section) for section in sections_of(collect(RESULTS))]
    section = next(section for section in sections if section.recipe == "t1_resnet32")
    row = section.row("repl")
    assert row is not None
    time, _, source = cost_of(section, row, list(measured.values()))
    assert (
        time
        == measured[source.removeprefix("measured-").replace("-", "_")].costs["t1_resnet32", "cifar10", "RepL"][0]
    )
    (part,) = summary(sections, list(measured.values()))
    assert f"{time:.2f} of E2E" in part.html.text
    assert f'href="#{source}"' in part.html.text


def test_int8_rows_say_where_they_were_measured() -> None:
    (entry,), _ = kind_of({"rows": [ROW], "hardware": {"device": "cpu", "threads": 2}, "versions": {"torch": "9"}})
    assert entry.made_on == "cpu, 2 threads, torch 9"
    ((_, columns),) = entry.tables
    assert columns["paper, INT8 img/s"] == ["250"]


@pytest.mark.parametrize(
    "data",
    [
        {"format": "replearn-bench-1", "training": [{}]},
        {"format": "replearn-bench-1", "training": [], "epochs": [3]},
        {"format": "replearn-bench-inference-1", "rows": [{"model": 3}]},
        {"rows": [{"int8_speedup": None}]},
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


def test_commands_are_written_from_what_a_file_says() -> None:
    assert command_of({"command": "replearn bench"}) == "replearn bench"
    given = {"epochs": 3, "no_operators": True, "run": None, "ranks": [1, 2], "x": False}
    shown = "python b.py --epochs 3 --no-operators --ranks 1 2 --out FILE"
    assert command_of({"script": "b.py", "arguments": given}) == shown
