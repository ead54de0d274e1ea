"""The report: what a folder holds, how it is drawn, and that nothing in a folder can break the page."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
from runs_made_up import RECIPE, run

import replearn
from replearn.errors import ReplearnError
from replearn.experiments import recipes
from replearn.experiments.report.collecting import collect, read_folder
from replearn.experiments.report.figures import MOST_POINTS, cost_figure, curves_figure, thinned
from replearn.experiments.report.page import build_report, page
from replearn.experiments.report.sections import sections_of
from replearn.experiments.report.svg import PALETTE, standalone_svg
from replearn.experiments.training.compare import compare
from replearn.experiments.training.comparison_table import comparison_table
from replearn.experiments.training.metrics import Metric
from replearn.experiments.training.paper import paper_tables
from replearn.experiments.training.recipe import Variant
from replearn.experiments.training.results import Result, read_result
from replearn.planning.serialization import encode

ACCURACY = Metric(name="accuracy", unit="%")


def put(folder: Path, result, name: str | None = None) -> Path:
    label = str(result.variant["label"]).lower().replace(" ", "-").replace("/", "-")
    place = folder / result.data / label / f"seed-{result.seed}"
    place.mkdir(parents=True, exist_ok=True)
    path = place / (name or "result.json")
    path.write_text(result.to_json(), encoding="utf-8")
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three methods over three seeds, measured alone, with a plan."""
    plan = json.loads(replearn.plan(replearn.models.resnet32(), interval=4).to_json())
    folder = tmp_path / "runs"
    for seed, wobble in enumerate((0.0, 0.2, -0.1)):
        put(folder, run("E2E", seed, 92.0 + wobble, seconds=2.0, memory=4_000_000_000))
        put(folder, run("removal", seed, 90.0 + 1.1 * wobble, seconds=1.5, memory=3_000_000_000))
        put(folder, run("RepL", seed, 91.0 + 0.9 * wobble, seconds=1.6, memory=3_200_000_000, plan=plan))
    return folder


def html(folder: Path) -> str:
    collection = read_folder(folder)
    return page(collection, sections_of(collection))


# ---- the page -----------------------------------------------------------------------------------


def test_the_page_is_one_file_that_asks_for_nothing_else(runs: Path, tmp_path: Path) -> None:
    report = build_report(runs, tmp_path / "out" / "report.html")
    text = report.page.read_text(encoding="utf-8")
    assert re.findall(r"""(?:src|href)=["'](?!#|data:,)([^"']*)""", text) == []
    assert re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert text.startswith("<!doctype html>")


def test_it_shows_means_intervals_verdicts_and_the_papers_numbers(runs: Path) -> None:
    text = html(runs)
    (section,) = sections_of(collect(runs))
    assert section.comparison is not None
    _, removal, repl = section.comparison.rows
    assert f"{repl.score:.2f} ± {repl.std:.2f}" in text
    assert removal.against_e2e is not None
    assert removal.against_e2e.verdict == "worse"
    assert '<span class="verdict worse">worse</span>' in text
    assert "93.43 ± 0.19" in text  # the paper's, of the made-up recipe
    assert "0.800" in text  # the time of RepL as a share of E2E's


def test_every_figure_is_whole_and_titled_for_screen_readers(runs: Path) -> None:
    (section,) = sections_of(collect(runs))
    assert [figure.name for figure in section.figures] == [
        f"made-up-cifar10-{e}" for e in ("runs", "cost", "curves")
    ]
    for figure in section.figures:
        root = ElementTree.fromstring(standalone_svg(figure).encode())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{http://www.w3.org/2000/svg}title").text
        sizes = [float(text.get("font-size")) for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert min(sizes) >= 12


def test_a_card_and_a_line_of_the_summary_tell_what_a_comparison_comes_to(runs: Path) -> None:
    (section,) = sections_of(collect(runs))
    assert section.deployed == {"E2E": 1.0, "removal": 1.0, "RepL": pytest.approx(418186 / 466906)}
    card = re.search(r'<article class="card small".*?</article>', html(runs), re.S)[0]
    assert "made_up on cifar10: resnet32, 2 epochs" in card
    assert '<span class="verdict worse">worse</span> RepL against E2E' in card
    assert '<span class="verdict better">better</span> RepL against removal' in card
    for text in ("92.03 ± 0.15 → 91.03 ± 0.14", ">0.800<", f">{section.deployed['RepL']:.3f}<"):
        assert text in card
    assert 'aria-label="every comparison: RepL against E2E and removal"' in html(runs)


def test_headings_tell_runs_apart_and_the_contents_name_them_all(tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(tmp_path / name, run("E2E", 0, 90.0))
    put(tmp_path / "three", run("E2E", 0, 90.0, recipe=replace(RECIPE, epochs=7)))
    titles = [section.title for section in sections_of(collect(tmp_path))]
    assert titles == [
        "made_up on cifar10: resnet32, 2 epochs (one/cifar10)",
        "made_up on cifar10: resnet32, 7 epochs",
        "made_up on cifar10: resnet32, 2 epochs (two/cifar10)",
    ]
    contents = re.search(r'id="contents">.*?</details>', html(tmp_path), re.S)[0]
    assert all(f">{title}</a>" in contents for title in titles)


def test_what_files_say_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"&"
    recipe = replace(RECIPE, name=evil, variants=(Variant(label=evil, method="e2e"),), paper=())
    put(tmp_path, run(evil, 0, 90.0, recipe=recipe, notes=(evil,), hardware={"device": evil}), "x.json")
    (tmp_path / "bench_odd.json").write_text(json.dumps({evil: evil, "rows": [{evil: evil}]}))
    text = html(tmp_path)
    assert text.count("<script>") == 1  # the page's own
    assert "alert('x')" not in text


def test_a_name_that_is_no_text_is_shown_by_its_bytes(tmp_path: Path) -> None:
    from command_line import shown

    good = put(tmp_path / "runs", run("E2E", 0, 90.0))
    for name, text in ((b"half-\xff", good.read_text()), (b"cut-\xfe", "{")):
        folder = Path(os.fsdecode(os.fsencode(tmp_path / "runs") + b"/" + name))
        folder.mkdir()
        (folder / "result.json").write_text(text)
    assert "cut-\\udcfe" in shown("report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"))
    assert "cut-\\udcfe" in (tmp_path / "page.html").read_text()


def test_an_empty_folder_and_a_missing_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(ReplearnError, match=r"no results below .*replearn compare RECIPE"):
        build_report(tmp_path, tmp_path / "r.html")
    with pytest.raises(ReplearnError, match=r"There is no folder .*nowhere"):
        build_report(tmp_path / "nowhere", tmp_path / "r.html")
    put(tmp_path, run("E2E", 0, 90.0))
    with pytest.raises(ReplearnError, match=r"one HTML file: write a name such as .*report\.html"):
        build_report(tmp_path, tmp_path / "out")


def test_files_that_cant_be_read_are_named_and_the_others_shown(runs: Path) -> None:
    good = (runs / "cifar10" / "e2e" / "seed-0" / "result.json").read_text()
    for name, text in {
        "half.json": good[: len(good) // 2],
        "empty.json": "",
        "old.json": good.replace("replearn-result-1", "replearn-result-0"),
        "odd.json": good.replace('"epochs": [', '"epochs": [3, ', 1),
        "text.json": good.replace('"test_accuracy": 92.0', '"test_accuracy": "high"', 1),
    }.items():
        (runs / name).write_text(text)
    (runs / "bytes.json").write_bytes(b"\xff\xfe{")
    reasons = {entry.path.name: entry.reason for entry in collect(runs).unread}
    assert "a run may be writing it just now" in reasons["half.json"]
    assert "a run may be writing it just now" in reasons["empty.json"]
    assert "another version (replearn-result-0; this one reads replearn-result-1)" in reasons["old.json"]
    assert "damaged" in reasons["odd.json"]
    assert "damaged" in reasons["text.json"]
    assert "can't be read" in reasons["bytes.json"]
    text = html(runs)
    assert "half.json" in text
    assert "9 runs" in text


def test_json_of_other_kinds_is_named_and_nothing_in_it_can_break_the_page(tmp_path: Path) -> None:
    rows = [{"a": [1, {"b": None}]}, {"c": float("nan")}]
    odd = ([], 3, None, "text", {}, {"rows": []}, {"rows": rows}, [[1], 2])
    for number, data in enumerate(odd):
        (tmp_path / f"bench_{number}.json").write_text(json.dumps(data))
    text = html(tmp_path).replace("<wbr>", "")
    assert all(f"bench_{number}.json" in text for number in range(len(odd)))


def test_runs_in_progress_are_shown_with_what_they_have(runs: Path) -> None:
    put(runs, replace(run("RepL first=2", 0, 80.0), finished=False))
    text = html(runs)
    assert "1 in progress" in text
    assert "stopped after 2 epochs: left out" in text


def test_runs_that_cant_be_compared_keep_the_rest_of_the_page(runs: Path) -> None:
    put(runs, run("E2E", 7, 90.0, recipe=replace(RECIPE, batch_size=999)))
    (section,) = sections_of(collect(runs))
    assert section.comparison is None
    assert "batch_size" in section.problem
    assert "can&#x27;t be compared" in html(runs)


def test_many_runs_make_a_page_that_stays_small(tmp_path: Path) -> None:
    base = run("E2E", 0, 90.0)
    long = replace(base, epochs=tuple(replace(base.epochs[0], epoch=n + 1) for n in range(25)))
    text = long.to_json()
    for number in range(200):
        place = tmp_path / f"recipe_{number % 50}" / "e2e" / f"seed-{number // 50}"
        place.mkdir(parents=True)
        held = text.replace('"made_up"', f'"recipe_{number % 50}"').replace('"seed": 0', f'"seed": {number // 50}')
        (place / "result.json").write_text(held)
    text = html(tmp_path)
    assert "200 runs" in text
    assert len(text) < 2_400_000
    assert text.count("<template>") == 50  # laid out only when opened


def test_the_command_writes_the_page_and_names_what_it_could_not_read(runs: Path, tmp_path: Path) -> None:
    from command_line import shown

    (runs / "half.json").write_text('{"format": "replearn')
    out = tmp_path / "page.html"
    told = shown("report", str(runs), "-o", str(out), "--title", "Mine & yours")
    assert "9 runs in 1 comparison." in told
    assert "not read: half.json" in told
    assert "<h1>Mine &amp; yours</h1>" in out.read_text(encoding="utf-8")
    assert "There is no folder" in shown("report", str(tmp_path / "nowhere"), code=2)


# ---- the figures --------------------------------------------------------------------------------


def num_points(mark: str) -> int:
    found = re.search(r'<polyline.* points="([^"]*)"', mark)
    return len(found[1].split()) if found else 0


def rows_of(*results):
    (comparison,) = compare(results)
    return comparison.rows


def test_costs_are_measured_ones_or_what_was_counted() -> None:
    rows = rows_of(run("E2E", 0, 92.0, memory=2_000_000_000), run("RepL", 0, 91.0, memory=1_000_000_000))
    drawing = cost_figure(rows, ACCURACY, "f")
    assert drawing is not None
    assert "time of an epoch" in drawing.about
    found = [re.search(r'data-tip="([^\n]*)\n([^"]*)"', mark) for mark in drawing.marks]
    tips = {tip[1]: tip[2] for tip in found if tip}
    assert tips["RepL"] == "accuracy 91.00 %\ntime 1.000 of E2E, memory 0.500"
    assert "accuracy 93.43 ± 0.19 %" in tips["RepL in the paper"]
    shared = rows_of(run("E2E", 0, 92.0, notes=("shared its device with other runs",)), run("RepL", 0, 91.0))
    assert "FLOPs" in cost_figure(shared, ACCURACY, "f").about
    assert cost_figure(shared[1:], ACCURACY, "f") is None


def test_the_papers_rings_are_left_out_where_they_would_leave_ours_a_single_spot() -> None:
    near, far = (rows_of(run("E2E", 0, 40.0 + more), run("RepL", 0, 39.0 + more)) for more in (52.0, 0.0))
    assert "Dashed rings" in cost_figure(near, ACCURACY, "f").about
    drawing = cost_figure(far, ACCURACY, "f")
    assert "too far away" in drawing.about
    assert not any("in the paper" in mark for mark in drawing.marks)


def test_files_that_are_not_shown_stand_together_by_reason(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text('{"a": 1}')
    (tmp_path / "odd.jsonl").write_text('{"a": 1}\n{"a"')
    (tmp_path / "log.jsonl").write_text("{")
    text = html(tmp_path)
    assert "one.json, two.json" in text
    assert "odd.jsonl" in text
    assert "log.jsonl" not in text


def test_curves_have_a_band_over_the_seeds_and_at_most_so_many_points() -> None:
    base = run("E2E", 0, 90.0)

    def reached(number: int, accuracy: float) -> object:
        return replace(base.epochs[0], epoch=number + 1, measures={"test_accuracy": accuracy})

    risen = [reached(number, 50 + number / 30) for number in range(1000)]
    higher = [reached(number, epoch.measures["test_accuracy"] + 1) for number, epoch in enumerate(risen)]
    long = [replace(base, seed=seed, epochs=tuple(epochs)) for seed, epochs in enumerate((risen, higher))]
    drawing = curves_figure(long, ACCURACY, "c")
    assert drawing is not None
    assert len([mark for mark in drawing.marks if mark.startswith("<polygon")]) == 1
    lines = [mark for mark in drawing.marks if mark.startswith('<polyline class="s-e2e"')]
    assert 2 < max(map(num_points, lines)) <= MOST_POINTS
    assert thinned(list(range(1, 1001)))[0] == 1
    assert thinned(list(range(1, 1001)))[-1] == 1000


def test_the_plan_is_shown_as_it_prints_itself(runs: Path, tmp_path: Path) -> None:
    (section,) = sections_of(collect(runs))
    assert escape(str(section.plans["RepL"])) in html(runs)
    assert "3 of 15 blocks replaced" in html(runs)
    put(tmp_path, run("RepL", 0, 91.0, plan={"targets": 3}))
    assert sections_of(collect(tmp_path))[0].plans == {}


def light(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_everything_that_is_read_stands_out_on_both_grounds() -> None:
    for role in PALETTE.keys() - {"ground", "grid"}:
        for one, ground in zip(PALETTE[role], PALETTE["ground"], strict=True):
            dark, bright = sorted((light(one), light(ground)))
            assert bright / dark >= 4.5, role


# ---- metrics, commands, the paper ---------------------------------------------------------------


def language_model_run(label: str, seed: int, perplexity: float, **changes) -> Result:
    """A run of the paper's language model, made up: judged by perplexity, with no accuracy at all."""
    base = run("E2E", 0, 90.0)
    recipe = recipes.recipe("tab_wikitext2")
    epochs = tuple(
        replace(epoch, measures={"train_loss": 5.0, "test_loss": math.log(value), "test_perplexity": value})
        for epoch, value in zip(base.epochs, (perplexity + 9, perplexity), strict=True)
    )
    fields = {"recipe": recipe.to_dict(), "variant": encode(recipe.variant(label)), "data": "wikitext2"}
    return replace(base, **{**fields, "seed": seed, "epochs": epochs, **changes})


def test_a_language_model_is_judged_by_perplexity_where_lower_is_better(tmp_path: Path) -> None:
    for seed in range(3):
        put(tmp_path, language_model_run("E2E", seed, 200.0 + seed))
        put(tmp_path, language_model_run("RepL projection", seed, 190.0 + 1.1 * seed))
        put(tmp_path, language_model_run("removal", seed, 215.0 + 0.9 * seed))
    collection = collect(tmp_path)
    assert collection.unread == ()
    (section,) = sections_of(collection)
    assert section.metric.title == "test perplexity (lower is better)"
    assert section.comparison is not None
    verdicts = {row.label: row.against_e2e.verdict for row in section.comparison.rows if row.against_e2e}
    assert verdicts == {"removal": "worse", "RepL projection": "better"}
    text = html(tmp_path)
    assert ">perplexity (lower is better)</th>" in text
    assert "perplexity 191.10 ± 1.10" in text  # in the hint of a bubble
    assert text.count(">195.42 ± 1.84<") == 1  # the paper's
    assert "accuracy" not in text


def test_a_run_that_blew_up_is_shown_and_breaks_no_figure(tmp_path: Path) -> None:
    put(tmp_path, language_model_run("E2E", 0, 200.0))
    put(tmp_path, language_model_run("RepL projection", 0, 190.0))
    lost = language_model_run("removal", 0, 1.0)
    last = replace(lost.last, measures={"test_loss": 900.0, "test_perplexity": math.inf})
    put(tmp_path, replace(lost, epochs=(lost.epochs[0], last)))
    (section,) = sections_of(collect(tmp_path))
    assert [figure.name.rpartition("-")[2] for figure in section.figures] == ["runs", "cost", "curves"]
    for figure in section.figures:
        assert not re.search(r'="[^"]*\b(nan|inf)\b', standalone_svg(figure))
    assert ">inf<" in html(tmp_path)


def test_the_commands_that_trained_the_runs_are_shown_once_each(tmp_path: Path) -> None:
    words = "replearn compare t1_resnet32 --seeds 0,1 --set 'classes=[1, 2]'"
    for seed in (0, 1):
        put(tmp_path, run("RepL", seed, 90.0, command=words))
    assert (
        html(tmp_path).count("<code>replearn compare t1_resnet32 --seeds 0,1 --set &#x27;classes=[1, 2]&#x27;<")
        == 1
    )
    put(tmp_path, run("E2E", 0, 90.0))  # of a run that Python started the recipe is named
    assert "<code>replearn compare cifar10/e2e/seed-0/recipe.json</code>" in html(tmp_path)


def test_the_data_file_holds_every_table_of_the_paper() -> None:
    tables = paper_tables()
    assert len(tables) == 17
    assert sum(len(table["rows"]) for table in tables.values()) == 120
    for table in tables.values():
        assert table["better"].keys() <= table["columns"].keys()
        for row in table["rows"]:
            assert row.keys() <= {"data", "backbone", "method", *table["columns"]}
            assert table["columns"].keys() <= row.keys()


def test_recipes_print_nothing_that_the_data_file_does_not_hold() -> None:
    """No second copy: every number of a recipe's paper rows is in its tables."""
    known = set()
    for table in paper_tables().values():
        for row in table["rows"]:
            for value in (row[key] for key in ("accuracy", "perplexity", "map", "iou") if key in row):
                known.add((row["data"], value[0] if isinstance(value, list) else value, row.get("memory")))
    for name in recipes.available():
        for printed in recipes.recipe(name).paper:
            if printed.memory_gb is not None:
                assert (printed.data, printed.score, printed.memory_gb) in known
    for path in Path(recipes.__file__).parent.glob("*.py"):
        assert not re.search(r"printed\([^)]*\d\d\.\d", path.read_text(encoding="utf-8"))


def places_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a JSON value, however deep; of a list the first entry."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*at, key)
        yield from places_in(item, (*at, key))


def test_a_field_of_a_wrong_type_never_ends_a_report_or_a_comparison(tmp_path: Path) -> None:
    good = run("E2E", 0, 90.0)
    put(tmp_path, good)
    plan = json.loads(replearn.plan(replearn.models.resnet32()).to_json())
    path = put(tmp_path, run("RepL", 0, 91.0, plan=plan))
    text, wrong = path.read_text(), [None, [], {}, "x", -1, True, 0.5, float("inf")]
    refused = 0
    for number, place in enumerate(places_in(json.loads(text))):
        data = json.loads(text)
        holder = data
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = wrong[number % 8]
        path.write_text(json.dumps(data))
        collection = collect(tmp_path)
        shown = page(collection, sections_of(collection)).replace("<wbr>", "")
        assert len(collection.runs) + len(collection.unread) + len(collection.others) == 2
        for entry in collection.unread:
            refused += 1
            assert entry.path.as_posix() in shown
        with suppress(ReplearnError):
            comparison_table(compare([good, read_result(path)])[0])
    assert refused > 80


@pytest.mark.parametrize("field", ["parameters_before", "targets", "num_blocks", "placement", "skipped"])
def test_a_plan_with_a_field_taken_out_never_ends_a_report(field: str, tmp_path: Path) -> None:
    put(tmp_path, run("E2E", 0, 90.0))
    plan = json.loads(replearn.plan(replearn.models.resnet32()).to_json())
    put(tmp_path, run("RepL", 0, 91.0, plan={name: value for name, value in plan.items() if name != field}))
    collection = collect(tmp_path)
    assert "RepL" in page(collection, sections_of(collection))
