"""Benchmark files in a report: each kind has its table, and stands beside the paper's rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs_made_up import RECIPE, run

from replearn.experiments.report.benchmarks import KINDS, measured_in
from replearn.experiments.report.collecting import Other, collect, read_folder
from replearn.experiments.report.figures import runs_figure
from replearn.experiments.report.page import page
from replearn.experiments.report.svg import standalone_svg
from replearn.experiments.training.compare import compare
from replearn.experiments.training.recipe import Variant

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def kind_of(data: Any) -> tuple[Any, list[Any]]:
    return measured_in([Other(path=Path("some/file.json"), data=data)])


def test_every_committed_file_is_a_part_of_a_table() -> None:
    measured, rest = measured_in(collect(RESULTS).others)
    assert [why for _, why in rest if why.startswith("looks")] == []  # nothing of a known kind is off its form
    steps, inference, compressed = (measured[kind] for kind in KINDS.values())
    for lines in (steps, inference, compressed):
        assert len({tuple(line) for line in lines}) == 1  # the same columns everywhere
    assert {"steps_h200.json", "steps_methods_vit_h200.json"} <= {line["file"] for line in steps}
    tables = {line["against"]: line["table"] for line in inference if line["paper"]}
    assert tables == {"RepL dynamic": "tab:dynamic_vs_deploy", "E2E": "tab:bp_vs_repl_deploy"}


def test_the_numbers_are_the_files_own() -> None:
    data = json.loads((RESULTS / "steps_h200.json").read_text())
    first = {row["label"]: row for row in data["training"][0]["rows"]}
    lines = {line["row"]: line for line in reversed(kind_of(data)[0][KINDS[data["format"]]])}
    assert lines["RepL"]["time"].startswith(f"{first['RepL']['time']['median']:.3f} [")
    assert (lines["RepL"]["verdict"], lines["RepL"]["paper: time"]) == ("better", "0.785")
    assert lines["removal"]["memory"] == f"{first['removal']['memory_ratio']:.3f}"


def test_networks_with_blocks_taken_out_are_means_over_draws() -> None:
    lines = measured_in(collect(RESULTS).others)[0][KINDS["compress"]]
    found = {(line["file"], line["method"], line["blocks out"]): line for line in lines}
    line = found["compress_published_resnet56_healed_cpu.jsonl", "realigned removal", "12"]
    assert (line["score"], line["trained"], line["draws"]) == ("86.77 ± 0.24", "92.95", "5")  # as in the README
    assert (line["latency"], line["parameters"]) == ("0.565", "0.544")


@pytest.mark.parametrize("labelled", [True, False])
def test_a_folder_of_the_compress_command_is_a_row(labelled: bool, tmp_path: Path) -> None:
    curve = {"kept": "accuracy", "points": [{"kept": 97.5}], "chosen": {"kept": 96.0}}
    data = {
        "model": "<mine>", "budget": "blocks=3", "num_blocks": 12, "num_samples": 512, "removed": ["a", "b", "c"],
        "before": {"latency": 4.0, "parameters": 100}, "after": {"latency": 3.0, "parameters": 60},
        "agreement": {"same": 0.99}, "bare_removal": {}, "curve": curve if labelled else None,
    }  # fmt: skip
    (tmp_path / "compress.json").write_text(json.dumps(data))
    text = page(read_folder(tmp_path), [])
    row = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", text)]
    kept = ["96.00", "97.50", "accuracy"] if labelled else ["99.00", "100.00", "agreement"]
    assert row[:2] == ["&lt;mine&gt;", "replearn compress, blocks=3"]
    assert row[2:] == ["3 of 12", *kept, "0.750", "0.600", "512", "1", "compress.json"]


@pytest.mark.parametrize(
    "data",
    [
        {"format": "replearn-bench-1", "training": [{}]},
        {"format": "replearn-bench-inference-1", "rows": [{"model": 3}]},
        {
            "format": "replearn-bench-inference-1",
            "rows": [
                {
                    "model": None,
                    "batch": 1,
                    "backend": "fp32",
                    "speedup": {"RepL deployed against E2E": {"median": 1.0, "low": 1.0, "high": 1.0}},
                    "paper": {},
                }
            ],
        },
    ],
)
def test_a_file_that_only_looks_known_is_named_and_says_why(data: Any, tmp_path: Path) -> None:
    known, ((_, why),) = kind_of(data)
    assert known == {}
    assert why.startswith("looks like ")
    (tmp_path / "odd.json").write_text(json.dumps(data))
    collection = read_folder(tmp_path)
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
