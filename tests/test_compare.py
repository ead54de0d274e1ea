"""Comparisons: the statistics are right, the last epoch counts, and what can't be compared is refused."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_made_up import RECIPE, run

from replearn import ReplearnError
from replearn.experiments import recipes
from replearn.experiments.report.claims import tables
from replearn.experiments.report.collecting import Collection, RunFile
from replearn.experiments.report.sections import sections_of
from replearn.experiments.training.compare import compare
from replearn.experiments.training.comparison_table import comparison_table, difference
from replearn.experiments.training.intervals import corrected, paired_difference
from replearn.experiments.training.packed import pack, thinned, unpack
from replearn.experiments.training.recipe import Variant
from replearn.experiments.training.results import SHARED, result_from_json

# ---- statistics --------------------------------------------------------------------------------


def test_the_interval_covers_the_true_difference_in_95_of_100_cases():
    chance = random.Random(0)
    hits, cases = 0, 4000
    for _ in range(cases):
        ours = {seed: chance.gauss(92.3, 0.2) for seed in range(4)}
        found = paired_difference(ours, dict.fromkeys(ours, 92.0))
        hits += found.low <= 0.3 <= found.high
    assert 0.94 < hits / cases < 0.96


values = st.floats(0, 100).map(lambda value: round(value, 2))


@given(st.dictionaries(st.integers(0, 5), values), st.dictionaries(st.integers(0, 5), values))
def test_a_difference_turned_round_is_its_mirror_image(ours, theirs):
    one, other = paired_difference(ours, theirs), paired_difference(theirs, ours)
    if not ours.keys() & theirs.keys():
        assert one is other is None
        return
    assert one.mean == -other.mean
    assert {one.verdict, other.verdict} in ({"better", "worse"}, {"undecided"})
    if one.low is not None:
        assert one.low == pytest.approx(-other.high)
        assert (one.verdict == "undecided") == (one.low <= 0 <= one.high)


def test_one_seed_decides_nothing():
    found = paired_difference({0: 99.0}, {0: 10.0})
    assert (found.mean, found.low, found.verdict) == (89.0, None, "undecided")


def test_equal_differences_have_an_unknown_spread_not_none():
    found = paired_difference({0: 97.5, 1: 98.0}, {0: 97.25, 1: 97.75})
    assert (found.mean, found.low, found.verdict) == (0.25, None, "undecided")


def test_only_seeds_that_both_have_are_compared():
    found = paired_difference({0: 1.0, 1: 2.1, 7: 99.0}, {0: 0.0, 1: 1.0, 8: 0.0})
    assert found.seeds == (0, 1)
    assert found.mean == pytest.approx(1.05)


def test_the_p_value_is_scipys_and_holms_correction_makes_verdicts_rarer():
    stats = pytest.importorskip("scipy.stats")
    chance = random.Random(1)
    base = {seed: chance.gauss(92, 0.2) for seed in range(5)}
    others = [{seed: base[seed] + chance.gauss(shift, 0.2) for seed in base} for shift in (0.3, 0.5, 0.25, 0)]
    family = [paired_difference(other, base) for other in others]
    raw = [stats.ttest_rel(list(other.values()), list(base.values())).pvalue for other in others]
    assert [found.p for found in family] == pytest.approx(raw)
    judged = corrected(family)
    falling = sorted(range(4), key=raw.__getitem__)
    steps = [min(1, raw[place] * (4 - rank)) for rank, place in enumerate(falling)]
    assert [judged[place].corrected for place in falling] == pytest.approx([max(steps[: n + 1]) for n in range(4)])
    assert all(found.verdict == ("better" if found.corrected < 0.05 else "undecided") for found in judged)
    assert [found.verdict for found in family] != [found.verdict for found in judged]


# ---- comparisons -------------------------------------------------------------------------------

E2E = {0: 92.2, 1: 92.0, 2: 92.4}
REMOVAL = {0: 91.6, 1: 91.5, 2: 91.7}
REPL = {0: 92.3, 1: 92.0, 2: 92.3}


def runs(label, accuracies, **changes):
    return [run(label, seed, accuracy, **changes) for seed, accuracy in accuracies.items()]


@pytest.fixture
def three():
    return [
        *runs("RepL", REPL, seconds=0.9, memory=910),
        *runs("removal", REMOVAL, seconds=0.8, memory=820),
        *runs("E2E", E2E),
    ]


def rows_of(results):
    (comparison,) = compare(results)
    return {row.label: row for row in comparison.rows}


def test_the_last_epoch_is_reported_and_the_best_stands_beside_it(three):
    row = rows_of(three)["RepL"]
    assert row.score == pytest.approx(92.2)
    assert row.best == pytest.approx(93.2)
    assert row.scores == (92.3, 92.0, 92.3)
    assert row.std == pytest.approx(0.1732, abs=1e-4)


def test_differences_are_paired_by_seed_and_have_a_verdict(three):
    rows = rows_of(three)
    assert rows["RepL"].against_e2e.mean == pytest.approx(0.0)
    assert rows["RepL"].against_e2e.verdict == "undecided"
    assert rows["RepL"].against_removal.mean == pytest.approx(0.6)
    assert rows["RepL"].against_removal.verdict == "better"
    assert rows["removal"].against_e2e.verdict == "worse"
    assert rows["E2E"].against_e2e is rows["E2E"].against_removal is rows["removal"].against_removal is None


def test_a_replacement_is_held_against_removal_of_the_same_targets(three):
    floor = {0: 92.0, 1: 91.9, 2: 92.1}
    rows = rows_of([*three, *runs("removal first=2", floor), *runs("RepL first=2", {0: 92.0, 1: 91.9, 2: 92.1})])
    assert rows["RepL first=2"].against_removal.mean == pytest.approx(0.0)
    assert rows["RepL"].against_removal.mean == pytest.approx(0.6)


def test_costs_are_ratios_to_end_to_end_and_the_papers_stand_beside(three):
    row = rows_of(three)["RepL"]
    assert (row.time_ratio, row.memory_ratio) == pytest.approx((0.9, 0.91))
    assert (row.paper_time_ratio, row.paper_memory_ratio) == (0.8, 0.75)
    assert (row.paper.score, row.paper.std) == (93.43, 0.19)
    assert rows_of(three)["removal"].paper is None


def test_rows_come_in_the_order_of_the_recipe(three):
    assert list(rows_of(three)) == ["E2E", "removal", "RepL"]


def test_data_sets_are_compared_apart(three):
    both = [*three, *runs("E2E", E2E, data="svhn"), *runs("RepL", REPL, data="svhn")]
    cifar10, svhn = compare(both)
    assert (cifar10.data, svhn.data) == ("cifar10", "svhn")
    assert all(row.paper is None for row in svhn.rows)


def test_a_run_that_stopped_is_left_out_and_named(three):
    (comparison,) = compare([*three, run("RepL", 3, 10.0, finished=False)])
    assert comparison.rows[-1].seeds == (0, 1, 2)
    assert comparison.notes == ("RepL, seed 3, stopped after 2 epochs: left out",)
    with pytest.raises(ReplearnError, match="No run of made_up on cifar10 is finished"):
        compare([run("RepL", 3, 10.0, finished=False)])


def test_runs_that_shared_a_device_have_no_time_of_their_own(three):
    (comparison,) = compare([replace(result, notes=(SHARED,)) for result in three])
    assert all(row.time_ratio is row.memory_ratio is None for row in comparison.rows)
    assert any("--together 1" in note for note in comparison.notes)
    assert "s/epoch" not in comparison_table(comparison)
    some = rows_of([replace(result, notes=(SHARED,)) if result.seed else result for result in three])
    assert some["RepL"].time_ratio == pytest.approx(0.9)


def test_times_on_different_hardware_are_not_divided(three):
    rows = rows_of([*three, *runs("RepL first=2", REPL, gpu="another GPU")])
    assert rows["RepL first=2"].time_ratio is None
    assert rows["RepL first=2"].against_e2e is not None
    assert rows["RepL"].time_ratio == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (run("RepL", 0, 92.0), "two results of RepL with seed 0"),
        (run("RepL", 5, 92.0, recipe=replace(RECIPE, epochs=3)), "epochs is 2 in one and 3 in another"),
        (
            run("RepL", 5, 92.0, variant={**run("RepL", 5, 1.0).variant, "interval": 2}),
            "interval is 4 in one and 2",
        ),
    ],
)
def test_what_can_not_be_compared_is_refused(three, extra, message):
    with pytest.raises(ReplearnError, match=message):
        compare([*three, extra])


def test_nothing_is_not_a_comparison():
    with pytest.raises(ReplearnError, match="no results to compare"):
        compare([])


def test_results_read_from_files_compare_as_those_in_memory(three):
    again = [result_from_json(result.to_json()) for result in three]
    assert compare(again) == compare(three)


def test_packed_runs_compare_as_the_runs_themselves(three):
    svhn = runs("E2E", E2E, data="svhn")
    text = pack([*three, *svhn])
    again = list(unpack(text, "runs.jsonl"))
    assert compare(again) == compare([*three, *svhn])
    assert pack(again) == text
    assert sum('"recipe"' in line for line in text.splitlines()) == 2  # once for each table


def test_of_long_curves_the_best_the_highest_and_the_last_epoch_stay():
    one = run("RepL", 0, 92.0)
    long = [replace(one.epochs[0], epoch=number + 1, measures={**one.epochs[0].measures}) for number in range(300)]
    long[137] = replace(long[137], measures={**long[137].measures, "test_accuracy": 99.0})
    long[211] = replace(long[211], peak_memory=5000)
    long[299] = replace(long[299], seconds=0.5)
    whole = replace(one, epochs=tuple(long))
    short = thinned(whole)
    assert len(short.epochs) <= 20
    assert {138, 212, 300} <= {epoch.epoch for epoch in short.epochs}
    for name in ("score", "best", "last", "epoch_seconds", "peak_memory"):
        assert getattr(short, name) == getattr(whole, name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda line: line[:-9], "is not JSON"),
        (lambda line: line.replace('"epochs": {', '"epochs": {"x": 3, '), "epochs is an object of lists"),
        (lambda line: line.replace('"seed": 0', '"seed": "0"'), "seed is a whole number from 0 on, not '0'"),
    ],
)
def test_a_damaged_line_is_named_and_the_others_are_read(three, change, says):
    lines = pack(three).splitlines()
    place = next(number for number, line in enumerate(lines) if '"seed": 0' in line)
    lines[place] = change(lines[place])
    found = list(unpack("\n".join(lines), "runs.jsonl"))
    (error,) = [each for each in found if isinstance(each, ReplearnError)]
    assert str(error).startswith(f"runs.jsonl, line {place + 1} is not")
    assert says in str(error)
    assert len(found) == len(three)
    (alone,) = unpack(lines[place], "runs.jsonl")
    assert isinstance(alone, ReplearnError)


def test_a_recipe_that_was_changed_says_so_beside_the_papers_number():
    shipped = recipes.recipe("t1_resnet32")
    (whole,) = compare([run("E2E", 0, 92.0, recipe=shipped)])
    assert whole.notes == ()
    (short,) = compare([run("E2E", 0, 92.0, recipe=replace(shipped, epochs=5))])
    assert short.notes == ("not the recipe as it is shipped: epochs is 5, not 250",)
    assert short.rows[0].paper.score == 93.17


# ---- views -------------------------------------------------------------------------------------


def test_the_table_shows_spread_interval_verdict_and_the_papers_number(three):
    (comparison,) = compare(three)
    text = comparison_table(comparison)
    line = next(line for line in text.splitlines() if line.startswith("RepL"))
    assert "92.20 ± 0.17" in line
    assert "+0.60 [+0.35, +0.85] better" in line
    assert "+0.00 [-0.25, +0.25] undecided" in line
    assert line.endswith("93.43 ± 0.19")
    assert "0.900" in text
    assert text.startswith("made_up: resnet32 on cifar10, 2 epochs (a GPU)")


def test_the_table_of_one_seed_says_why_it_decides_nothing():
    (comparison,) = compare([run("E2E", 0, 92.0), run("RepL", 0, 93.0)])
    assert "+1.00 (1 seed) undecided" in comparison_table(comparison)


def test_a_comparison_is_plain_json(three):
    (comparison,) = compare(three)
    again = json.loads(json.dumps(comparison.to_dict()))
    assert again["rows"][2]["against_removal"]["verdict"] == "better"
    assert again["rows"][2]["paper"]["score"] == 93.43


def test_the_picture_has_every_run_the_verdicts_and_the_costs(three, tmp_path):
    from replearn.experiments.report.figures import draw

    (comparison,) = compare(three)
    text = draw(comparison, tmp_path / "three.svg").read_text()
    runs = sum(len(row.scores) for row in comparison.rows)
    assert text.count("<circle") == runs + len(comparison.rows)
    for row in comparison.rows[1:]:
        assert f"{row.against_e2e.verdict} against E2E (" in text
        assert f"time {row.time_ratio:.2f}, memory" in text


def test_a_method_without_targets_is_not_held_against_removal():
    variants = (*RECIPE.variants, Variant(label="Stochastic Depth", method="stochastic_depth"))
    variants += (Variant(label="Both", method="repl+stochastic_depth"),)
    recipe = replace(RECIPE, variants=variants)
    labels = ("E2E", "removal", "Stochastic Depth", "Both")
    (found,) = compare([run(label, seed, 90.0 + seed, recipe=recipe) for label in labels for seed in (0, 1)])
    assert [row.label for row in found.rows if row.against_removal is not None] == ["Both"]


# ---- claims ------------------------------------------------------------------------------------


def judged(*files):
    """The tables of runs that lie in a file each."""
    held = [RunFile(Path(f"{number}.jsonl"), run) for number, runs in enumerate(files) for run in runs]
    return tables(sections_of(Collection(root=Path(), runs=tuple(held))), {})


def test_claims_hold_the_papers_numbers_ours_and_the_verdict_of_the_family(three):
    short, first, *others = judged(three)
    assert (short.title, first.title) == ("In short", "What the paper prints")
    assert [row[1:] for row in short.rows] == [("1 undecided", "1 better"), ("1 better", "")]
    ((row, e2e, removal, seeds, epochs, ours, paper, table),) = first.rows
    assert (table, row, seeds, epochs) == ("", "resnet32, cifar10: RepL", "3", "2")
    assert paper.replace("\xa0", " ") == "93.17 ± 0.14 → 93.43 ± 0.19"
    assert ours.replace("\xa0", " ") == "92.20 ± 0.20 → 92.20 ± 0.17"
    assert (e2e.verdict, round(e2e.corrected, 3)) == ("undecided", 1.0)
    assert difference(removal) == "+0.60 [+0.35, +0.85] better"
    commands = [command for _, _, command, why, _ in others[-1].rows if why == "no data here"]
    assert any(command.startswith("`replearn compare t2_") for command in commands)
    unjudged = judged(trained("t1_resnet32"))[-1].rows
    assert not any("t1_resnet32 --data cifar10" in command for _, _, command, *_ in unjudged)


def trained(name):
    recipe = recipes.recipe(name)
    return [run(label, seed, 92.0 + seed, recipe=recipe) for label in ("E2E", "RepL") for seed in (0, 1)]


def test_of_several_files_the_longest_training_is_judged(three):
    short = [run(label, 0, 50.0, recipe=replace(RECIPE, epochs=1)) for label in ("E2E", "RepL")]
    assert judged(short, three)[0].rows == judged(three)[0].rows
    assert judged([run("RepL", 0, 50.0, finished=False)])[0].title == "Not judged here"
