"""Budgets, the knapsack against brute force, scores, and placements that explain themselves."""

import copy
from itertools import combinations, pairwise

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import replearn
from replearn import operators
from replearn.blocks.stacks import find_stacks
from replearn.costs.budgets import as_budgets
from replearn.fitting.closed_form import fitted_errors
from replearn.fitting.knapsack import Item, choose, most_saved
from replearn.planning.legality import Survey

# ---- the knapsack -------------------------------------------------------------------------------


def legal_sets(stacks):
    """Every set of items without neighbours."""
    every = [(stack, index) for stack, items in enumerate(stacks) for index in range(len(items))]
    for size in range(len(every) + 1):
        for chosen in combinations(every, size):
            places = {(stack, stacks[stack][index].position) for stack, index in chosen}
            if not any((stack, position + 1) in places for stack, position in places):
                yield chosen


def totals(stacks, chosen, needs):
    items = [stacks[stack][index] for stack, index in chosen]
    return sum(item.damage for item in items), [sum(item.saves[i] for item in items) for i in range(needs)]


def items(needs):
    number = st.integers(-3, 12)
    saves = st.tuples(*[number] * needs)
    one = st.tuples(st.integers(0, 9), saves)
    stack = st.lists(one, max_size=4).map(
        lambda found: [Item(position, damage, saved) for position, (damage, saved) in enumerate(found, start=2)]
    )
    return st.tuples(st.lists(stack, min_size=1, max_size=2), st.tuples(*[st.integers(1, 25)] * needs))


@pytest.mark.parametrize("needs", [1, 2])
def test_the_choice_is_the_best_of_all_choices(needs):
    @settings(max_examples=60, deadline=None)
    @given(items(needs))
    def check(problem):
        stacks, needed = problem
        fitting = [
            totals(stacks, chosen, needs)[0]
            for chosen in legal_sets(stacks)
            if all(a >= b for a, b in zip(totals(stacks, chosen, needs)[1], needed, strict=True))
        ]
        found = choose(stacks, needed)
        assert (found is None) == (not fitting)
        if found is not None:
            assert tuple(sorted(found)) in set(legal_sets(stacks))
            damage, saved = totals(stacks, found, needs)
            assert damage == min(fitting)
            assert all(a >= b for a, b in zip(saved, needed, strict=True))

    check()


@settings(max_examples=60, deadline=None)
@given(items(1))
def test_a_rounded_choice_still_meets_the_need(problem):
    stacks, needed = problem
    exact, rounded = choose(stacks, needed), choose(stacks, needed, most_states=1)
    assert (exact is None) == (rounded is None)
    if rounded is not None:
        assert totals(stacks, rounded, 1)[1][0] >= needed[0]


@settings(max_examples=60, deadline=None)
@given(items(1))
def test_the_most_that_can_be_saved_is_the_most(problem):
    stacks, _ = problem
    assert most_saved(stacks, 0)[0] == max(totals(stacks, chosen, 1)[1][0] for chosen in legal_sets(stacks))


def test_a_hundred_different_blocks_are_chosen_from_at_once():
    stack = [Item(p, 1 + (p * 37 % 101) / 101, ((p * 53 % 97) + 0.5,)) for p in range(2, 102)]
    need = most_saved([stack], 0)[0] * 0.7
    found = choose([stack], [need])
    positions = sorted(stack[index].position for _, index in found)
    assert sum(stack[index].saves[0] for _, index in found) >= need
    assert all(b - a > 1 for a, b in pairwise(positions))


# ---- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "quantity", "at_most", "share"),
    [
        ("memory<=75%", "memory", 0.75, True),
        ("time <= 80 %", "time", 0.8, True),
        ("parameters<=60M", "parameters", 60e6, False),
        ("Memory<=1.5GiB", "memory", 1.5 * 2**30, False),
        ("activations<=20gb", "activations", 20e9, False),
        ("time<=150ms", "time", 0.15, False),
        ("flops<=2T", "flops", 2e12, False),
        ("parameters<=1234", "parameters", 1234, False),
    ],
)
def test_budgets_are_read_from_text(text, quantity, at_most, share):
    (found,) = as_budgets(text)
    assert (found.quantity, found.share) == (quantity, share)
    assert found.at_most == pytest.approx(at_most)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("memory<75%", ("'memory<75%'", "memory<=20GiB")),
        ("power<=3", ("'power<=3'",)),
        ("memory<=20", ("no unit of memory", "gib")),
        ("memory<=120%", ("between 0 and 1",)),
        ("time<=1.2.3s", ("budget='time<=1.2.3s' can't be read",)),
        ((), ("write a budget",)),
        (3, ("budget=3",)),
    ],
)
def test_a_budget_that_cannot_be_read_is_said(wrong, words):
    with pytest.raises(replearn.ReplearnError) as caught:
        as_budgets(wrong)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_budgets_are_checked_as_data_too():
    with pytest.raises(replearn.ReplearnError, match="only of latency, parameters"):
        replearn.costs.Budget("power", 0.5)
    with pytest.raises(replearn.ReplearnError, match="a number above 0"):
        replearn.costs.Budget("memory", -1.0, share=False)
    assert as_budgets([replearn.costs.Budget("memory", 0.5), "memory<=50%"]) == (
        replearn.costs.Budget("memory", 0.5),
    )


# ---- scores -------------------------------------------------------------------------------------


def legal_targets(model, operator):
    stacks = find_stacks(model)
    survey = Survey(model, stacks, operator)
    return [target for stack in stacks for target in survey.at(stack, survey.legal(stack))]


def batches(count=6, width=4):
    torch.manual_seed(0)
    return [torch.randn(8, width, 8, 8) for _ in range(count)]


def test_every_legal_target_is_scored_and_the_model_stays():
    torch.manual_seed(0)
    model = tiny.Stages(5, 4).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = batches()
    full = fitted_errors(model, legal_targets(model, operators.Basic(correction="full")), data)
    assert [score.name for score in full] == ["stages.0.1", "stages.0.2", "stages.0.3", "stages.1.1", "stages.1.2"]
    span = fitted_errors(model, legal_targets(model, None), data)
    for close, loose in zip(full, span, strict=True):
        assert 0 < close.error * close.share < loose.error * loose.share <= loose.removal_error * loose.share
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (operators.Basic(), 2),
        (operators.Basic(correction="low-rank", rank=2), 1),
        (operators.Basic(correction="full"), 7),
        (operators.WholeBlock(), 2),
    ],
    ids=lambda given: given.label() if hasattr(given, "label") else str(given),
)
def test_a_score_is_what_calibration_reaches(options, count):
    """Of one target in the intact model, on the same held-out rows."""
    torch.manual_seed(0)
    model, data = tiny.Stages(4).eval(), batches(count)
    for score in fitted_errors(model, legal_targets(model, options), data):
        own = copy.deepcopy(model)
        plan = replearn.plan(own, targets=[score.name], operator=options)
        (fit,) = replearn.calibrate_(own, plan, data, correction="none").fits
        assert (score.error, score.removal_error) == pytest.approx((fit.error, fit.removal_error), rel=1e-7)
        seen = {}
        model.get_submodule(score.name).register_forward_hook(lambda m, a, y, seen=seen: seen.update(x=a[0], y=y))
        with torch.no_grad():
            held_all = [batch for number, batch in enumerate(data) if number % 5 == 1] or [data[0][-1:]]
            powers = []
            for batch in held_all:
                model(batch)
                x, y = seen["x"].double(), seen["y"].double()
                powers.append(((x - y).square().sum(), y.square().sum()))
        removal, power = (sum(part) for part in zip(*powers, strict=True))
        assert score.removal_error * score.share == pytest.approx(float(removal / power), rel=1e-5)


def test_an_iterator_cannot_be_gone_through_again():
    model = tiny.Stages(4)
    with pytest.raises(replearn.ReplearnError, match="give a list or a loader, not an iterator"):
        fitted_errors(model, legal_targets(model, None), iter(batches(2)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], ("empty",)),
        ([torch.randn(4, 9, 8, 8)], ("could not be run on calibration batch 0", "dict of keywords")),
        ([torch.randn(4, 4, 8, 8), torch.full((4, 4, 8, 8), torch.nan)], ("stages.0.1", "NaN", "batch 1")),
        ([torch.randn(1, 4, 8, 8)], ("single sample",)),
    ],
)
def test_data_that_cannot_work_is_said(data, words):
    model = tiny.Stages(4)
    with pytest.raises(replearn.ReplearnError) as caught:
        fitted_errors(model, legal_targets(model, None), data)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- placements ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny.Stages(6, 4).eval()


EXAMPLE = torch.empty(16, 4, 16, 16, device="meta")


def test_a_placement_is_the_cheapest_that_meets_its_budget(model):
    damages = {"stages.0.1": 3.0, "stages.0.2": 1.0, "stages.0.3": 2.5, "stages.0.4": 1.2}
    damages |= {"stages.1.1": 0.3, "stages.1.2": 0.2}
    placement = replearn.fitting.place(model, "activations<=90%", EXAMPLE, score=damages)
    saves = {candidate.name: candidate.saves.activation_bytes for candidate in placement.candidates}
    before = placement.promise.before.total.activation_bytes
    good = []
    for size in range(1, 4):
        for names in combinations(damages, size):
            near = any(a[:-1] == b[:-1] and abs(int(a[-1]) - int(b[-1])) == 1 for a, b in combinations(names, 2))
            if not near and before - sum(saves[name] for name in names) <= 0.9 * before:
                good.append((sum(damages[name] for name in names), names))
    assert tuple(target.name for target in placement.plan.targets) == min(good)[1]
    assert placement.promise.after.total.activation_bytes <= 0.9 * before
    assert placement.plan.placement == "budget activations<=90%, by given scores"
    assert replearn.Plan.from_json(placement.plan.to_json()) == placement.plan
    text = str(placement)
    for words in (
        "replaced",
        "saves activations",
        "the least that is reachable",
        "of 6 legal targets",
        "predicted",
    ):
        assert words in text


def test_parameters_are_met_exactly_by_what_replace_makes(model):
    placement = replearn.fitting.place(model, "parameters<=90%", EXAMPLE, score="similarity", data=batches(2))
    own = tiny.Stages(6, 4)
    replearn.replace_(own, placement.plan)
    count = sum(parameter.numel() for parameter in own.parameters())
    assert count == placement.promise.after.total.trainable <= 0.9 * placement.promise.before.total.trainable
    assert placement.score == "similarity"


def test_fitted_errors_place_targets(model):
    options = operators.Basic(correction="full")
    placement = replearn.fitting.place(
        model, "flops<=95%", EXAMPLE, score="error", data=batches(3), operator=options
    )
    chosen = [candidate for candidate in placement.candidates if candidate.chosen]
    assert chosen
    assert sum(candidate.damage for candidate in chosen) > 0


def test_several_budgets_are_all_met(model):
    machine = replearn.costs.named_machine("T4")
    given = torch.empty(512, 4, 16, 16, device="meta")
    placement = replearn.fitting.place(model, "memory<=97%, time<=97%", given, machine=machine)
    assert placement.promise.ratio("memory_bytes") <= 0.97
    assert placement.promise.ratio("seconds") <= 0.97


@pytest.mark.parametrize(
    ("budget", "extra", "words"),
    [
        (
            "memory<=10%",
            {},
            ("meets the budget", "memory<=10% asks for", "can be reached is", "operators.Removal()"),
        ),
        ("parameters<=10G", {}, ("meets its budget already",)),
        ("time<=80%", {}, ("needs to know the machine", "named_machine")),
        ("memory<=99%", {"score": "luck"}, ("'luck'", "count, similarity, error")),
        ("memory<=99%", {"score": "error"}, ("needs data",)),
        ("memory<=99%", {"score": {"stages.0.1": 1.0}}, ("no number for stages.0.2",)),
    ],
)
def test_a_budget_that_cannot_be_met_is_said(model, budget, extra, words):
    with pytest.raises(replearn.ReplearnError) as caught:
        replearn.fitting.place(model, budget, EXAMPLE, **extra)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_scores_that_are_no_numbers_are_said(model):
    scores = {f"stages.0.{i}": float("nan") for i in range(1, 5)} | {"stages.1.1": 1.0, "stages.1.2": 1.0}
    with pytest.raises(replearn.ReplearnError, match="damages are finite numbers"):
        replearn.fitting.place(model, "memory<=99%", EXAMPLE, score=scores)
