"""Budgets as text, and the plan of the fewest blocks that meets one."""

from itertools import combinations

import pytest
import tiny
import torch

import replearn
from replearn.costs.budgets import as_budgets


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
        ("memory<=120%", ("a share below 100%",)),
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


# ---- plans within a budget ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny.Stages(6, 4).eval()


EXAMPLE = torch.empty(16, 4, 16, 16, device="meta")
DAMAGES = {"stages.0.1": 3.0, "stages.0.2": 1.0, "stages.0.3": 2.5, "stages.0.4": 1.2}
DAMAGES |= {"stages.1.1": 0.3, "stages.1.2": 0.2}


def cost_after(model, targets):
    return replearn.costs.estimate(model, EXAMPLE, replearn.plan(model, targets=targets)).after.total


def sets_of(count):
    """Every set of so many legal targets, with its damage."""
    for names in combinations(DAMAGES, count):
        near = any(a[:-1] == b[:-1] and abs(int(a[-1]) - int(b[-1])) == 1 for a, b in combinations(names, 2))
        if not near:
            yield sum(DAMAGES[name] for name in names), names


@pytest.mark.parametrize("count", [1, 2, 3])
def test_given_damages_take_the_blocks_of_the_least_sum(model, count):
    plan = replearn.plan(model, budget=f"blocks={count}", score=DAMAGES)
    assert tuple(target.name for target in plan.targets) == min(sets_of(count))[1]
    assert plan.placement == f"budget blocks={count}, by given scores"
    assert replearn.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("score", ["count", DAMAGES], ids=["count", "damages"])
def test_the_fewest_blocks_that_meet_the_budget_go(model, score):
    plan = replearn.plan(model, budget="activations<=90%", example=EXAMPLE, score=score)
    before = replearn.costs.predict(model, EXAMPLE).total.activation_bytes
    assert cost_after(model, [target.name for target in plan.targets]).activation_bytes <= 0.9 * before
    fewer = replearn.plan(model, budget=f"blocks={len(plan.targets) - 1}", score=score)
    assert cost_after(model, [target.name for target in fewer.targets]).activation_bytes > 0.9 * before


def test_parameters_are_met_exactly_by_what_replace_makes(model):
    data = [torch.randn(8, 4, 8, 8)]
    plan = replearn.plan(model, budget="parameters<=90%", score="similarity", data=data)
    own = tiny.Stages(6, 4)
    before = sum(parameter.numel() for parameter in own.parameters())
    deployed = replearn.deploy(replearn.replace_(own, plan).eval(), fold="operators")
    assert sum(parameter.numel() for parameter in deployed.parameters()) == plan.deployed_after <= 0.9 * before


def test_several_budgets_are_all_met(model):
    machine = replearn.costs.named_machine("T4")
    given = torch.empty(512, 4, 16, 16, device="meta")
    plan = replearn.plan(model, budget="memory<=97%, time<=97%", example=given, machine=machine)
    promise = replearn.costs.estimate(model, given, plan, machine=machine)
    assert promise.ratio("memory_bytes") <= 0.97
    assert promise.ratio("seconds") <= 0.97


@pytest.mark.parametrize(
    ("budget", "extra", "words"),
    [
        (
            "memory<=10%",
            {},
            (
                "meets the budget",
                "memory<=10% asks for",
                "the most that can go",
                "operator='removal'",
            ),
        ),
        ("parameters<=10G", {}, ("meets its budget already",)),
        ("time<=80%", {}, ("needs to know the machine", "named_machine")),
        ("memory<=99%", {"score": "luck"}, ("'luck'", "count, similarity")),
        ("memory<=99%", {"score": "similarity"}, ("needs data",)),
        ("memory<=99%", {"score": {"stages.0.1": 1.0}}, ("no number for stages.0.2",)),
        ("memory<=99%", {"score": DAMAGES | {"stages.1.1": float("nan")}}, ("damages are finite numbers",)),
    ],
)
def test_a_budget_that_cannot_be_met_is_said(model, budget, extra, words):
    with pytest.raises(replearn.ReplearnError) as caught:
        replearn.plan(model, budget=budget, example=EXAMPLE, **extra)
    assert all(word in str(caught.value) for word in words), str(caught.value)
