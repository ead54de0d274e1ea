"""Which blocks become targets: interval, fraction, names and similarity, and what can't be honoured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import everything

import replearn
from replearn import ReplearnError
from replearn.fitting.observe import block_similarity
from replearn.planning.positions import best_nonadjacent, evenly, max_nonadjacent

quick = settings(max_examples=150, deadline=None, derandomize=True)


def names(plan: replearn.Plan) -> list[str]:
    return [target.name for target in plan.targets]


def staged(*lengths: int) -> nn.Module:
    with torch.device("meta"):
        return tiny.Stages(*lengths)


# ---- interval and first -------------------------------------------------------------------------


def test_a_stack_in_which_the_interval_takes_one_block_or_none_begins_at_two_where_that_takes_more() -> None:
    plan = replearn.plan(staged(3, 4, 6, 3))
    assert [target.name for target in plan.targets] == ["stages.0.1", "stages.1.1", "stages.2.3", "stages.3.1"]
    assert plan.placement == "interval=4, first=2 or 4"
    assert len(replearn.plan(staged(12)).targets) == 2  # the paper's rule where it finds blocks


def test_interval_counts_from_one_in_every_stack_and_never_takes_the_ends() -> None:
    plan = replearn.plan(staged(7, 5), interval=3, first=2)
    assert [(t.name, t.position, t.previous, t.next) for t in plan.targets] == [
        ("stages.0.1", 2, "stages.0.0", "stages.0.2"),
        ("stages.0.4", 5, "stages.0.3", "stages.0.5"),
        ("stages.1.1", 2, "stages.1.0", "stages.1.2"),
    ]
    assert [(s.name, s.position) for s in plan.skipped] == [("stages.1.4", 5)]
    assert plan.skipped[0].reason == "last block of its stack: it has no next source"


@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=3),
    interval=st.integers(2, 6),
    first=st.integers(2, 6),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_interval_is_the_printed_formula_in_every_stack(lengths: list[int], interval: int, first: int) -> None:
    model = staged(*lengths)
    taken = [(i, r) for i, length in enumerate(lengths) for r in range(first, length, interval)]
    expected = [f"stages.{i}.{r - 1}" for i, r in taken]
    if expected:
        assert names(replearn.plan(model, interval, first)) == expected
    else:
        with pytest.raises(ReplearnError, match="has no targets"):
            replearn.plan(model, interval, first)


def test_a_block_that_has_to_be_kept_is_skipped_with_its_reason() -> None:
    model = tiny.Stages(9)
    model.stages[0][1].register_forward_hook(lambda module, args, out: None)
    model.stages[0][3] = model.stages[0][7]
    plan = replearn.plan(model, 2, first=2)
    assert names(plan) == ["stages.0.5"]
    assert {entry.name: entry.reason for entry in plan.skipped} == {
        "stages.0.1": "it has hooks, which would be lost with it; remove them, or keep the block",
        "stages.0.3": "the same module is also registered as stages.0.7",
        "stages.0.7": "the same module is also registered as stages.0.3",
    }


# ---- fraction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25, 0.3, 0.4])
def test_fraction_takes_exactly_its_share_and_never_two_adjacent(fraction: float) -> None:
    model = staged(6, 9, 5)
    plan = replearn.plan(model, fraction=fraction)
    assert len(plan.targets) == round(fraction * 20)
    kept = {t.previous for t in plan.targets} | {t.next for t in plan.targets}
    assert not kept & set(names(plan))


def test_fraction_spreads_over_all_stacks_and_inside_each() -> None:
    assert names(replearn.plan(staged(5, 5, 5), fraction=0.2)) == ["stages.0.2", "stages.1.2", "stages.2.2"]
    assert [t.position for t in replearn.plan(staged(12), fraction=0.25).targets] == [3, 6, 9]


def choices(positions: Sequence[int], count: int) -> list[tuple[int, ...]]:
    some = itertools.combinations(sorted(positions), count)
    return [chosen for chosen in some if all(b - a > 1 for a, b in itertools.pairwise(chosen))]


subsets = st.sets(st.integers(2, 12), max_size=9).map(sorted)


@given(
    scores=st.dictionaries(st.integers(1, 11), st.floats(-1, 1).map(lambda x: round(x, 3)), max_size=8),
    count=st.integers(0, 6),
)
@quick
def test_best_apart_is_the_best_brute_force_choice(scores: dict[int, float], count: int) -> None:
    legal = choices(list(scores), count)
    assume(legal)
    taken = best_nonadjacent(
        "0123456789ab", {"0123456789ab"[place]: score for place, score in scores.items()}, count
    )
    found = sorted(int(name, 12) for name in taken)
    assert tuple(found) in legal
    assert sum(scores[p] for p in found) == pytest.approx(max(sum(scores[p] for p in c) for c in legal), abs=1e-9)


@given(legal=st.lists(subsets, min_size=1, max_size=4), count=st.integers(0, 9))
@quick
def test_evenly_is_in_proportion_and_as_even_as_brute_force(legal: list[list[int]], count: int) -> None:
    stacks = {f"stack{i}": positions for i, positions in enumerate(legal)}
    room = {name: max_nonadjacent(positions) for name, positions in stacks.items()}
    total = sum(room.values())
    assume(0 < count <= total)
    found = evenly(stacks, count)
    assert sum(len(chosen) for chosen in found.values()) == count
    for name, chosen in found.items():
        assert tuple(chosen) in choices(stacks[name], len(chosen))
        assert abs(len(chosen) - count * room[name] / total) < 1  # a fair share, rounded
        assert unevenness(stacks[name], chosen) == pytest.approx(
            min(unevenness(stacks[name], other) for other in choices(stacks[name], len(chosen))), abs=1e-9
        )


def unevenness(legal: Sequence[int], chosen: Sequence[int]) -> float:
    """The summed distance to the middles of as many equal parts of the legal range."""
    if not chosen:
        return 0.0
    low, high, count = min(legal), max(legal), len(chosen)
    return sum(abs(p - (low + (high - low) * (i + 0.5) / count)) for i, p in enumerate(sorted(chosen)))


# ---- names --------------------------------------------------------------------------------------


def test_named_targets_come_in_the_model_s_order_each_once() -> None:
    plan = replearn.plan(staged(5, 5), targets=iter(["stages.1.3", "stages.0.1", "stages.1.3"]))
    assert names(plan) == ["stages.0.1", "stages.1.3"]
    assert plan.placement == "named targets"


def test_two_placements_at_once_are_an_error_and_not_a_silent_choice() -> None:
    settings: dict[str, Any] = {"targets": ["stages.0.1"], "budget": "blocks=1", "fraction": 0.2, "first": 2}
    for one, other in itertools.combinations(settings, 2):
        with pytest.raises(ReplearnError, match="leave out"):
            replearn.plan(staged(5), **{one: settings[one], other: settings[other]})


# ---- similarity ---------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Turns its input by an angle it is told, in the mode it is in, and leaves marks where it can."""

    def __init__(self, angle: float) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(angle))
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.norm(torch.rand_like(x))
        turned = torch.stack([-x[:, 1], x[:, 0]], 1)
        return x.copy_(torch.cos(self.angle) * x + torch.sin(self.angle) * turned)  # in place, as some blocks do


class Turns(nn.Module):
    def __init__(self, *angles: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy(angle) for angle in angles)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> tuple[Tensor, int]:
        x = x.clone() if extra is None else x + extra
        for block in self.blocks:
            x = block(x)
        return x, 0


ANGLES = (0.3, 0.8, 0.1, 0.9, 0.2, 0.7, 0.4)
WHERE_MOST_ALIKE = ["blocks.2", "blocks.4"]


def by_similarity(model: nn.Module, data: Any, budget: str = "blocks=2") -> replearn.Plan:
    return replearn.plan(model, budget=budget, score="similarity", data=data)


@pytest.mark.parametrize(
    "data",
    [
        torch.randn(5, 2, generator=torch.Generator().manual_seed(0)),
        [(torch.ones(5, 2), torch.ones(5, 2))],
        {"extra": torch.ones(3, 2), "x": torch.ones(3, 2)},
    ],
    ids=["tensor", "tuple", "dict"],
)
def test_similarity_takes_the_blocks_whose_output_is_most_like_their_input(data: Any) -> None:
    plan = by_similarity(Turns(*ANGLES), data)
    assert names(plan) == WHERE_MOST_ALIKE
    assert plan.placement == "budget blocks=2, by similarity"


def test_similarity_is_the_mean_cosine_of_output_and_input() -> None:
    model = Turns(*ANGLES)
    scores = block_similarity(model, {f"blocks.{i}": "x" for i in range(7)}, torch.randn(4, 2))
    for i, angle in enumerate(ANGLES):
        assert scores[f"blocks.{i}"] == pytest.approx(float(torch.tensor(angle).cos()), abs=1e-6)


def test_a_block_that_changes_the_shape_has_the_worst_score() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    assert block_similarity(model, {"0": "input", "1": "input"}, torch.randn(2, 3))["0"] == -1.0


@pytest.mark.parametrize("fails", [False, True], ids=["a good batch", "a batch that fails halfway"])
def test_similarity_leaves_no_trace_on_the_model(fails: bool) -> None:
    model = Turns(*ANGLES).train()
    model.blocks[3].eval()
    model.blocks[5].angle.requires_grad_(False)
    model.blocks[1].angle.grad = torch.tensor(5.0)
    batch = torch.randn(4, 2)
    given = batch.clone()
    if fails:
        handle = model.blocks[4].register_forward_pre_hook(lambda module, args: 1 / 0)
    before = everything(model, versions=False)
    if fails:
        with pytest.raises(ReplearnError, match="could not be run on calibration batch 0"):
            by_similarity(model, batch)
    else:
        by_similarity(model, batch)
    after = everything(model, versions=False)
    assert [key for key in before if before[key] != after[key]] == []
    assert torch.equal(batch, given)
    if fails:
        handle.remove()


# ---- budgets ------------------------------------------------------------------------------------


def test_a_number_of_blocks_is_spread_evenly_and_needs_no_example() -> None:
    plan = replearn.plan(tiny.resnet(32), budget="blocks=3")
    assert [target.stack for target in plan.targets] == ["layer1", "layer2", "layer3"]
    assert plan.placement == "budget blocks=3, by count"


@pytest.mark.parametrize("budget", ["parameters<=80%", "flops<=80%", "latency<=90%", "memory<=95%"])
def test_a_budget_is_met_once_deployed_as_it_says(budget: str) -> None:
    model, images = tiny.resnet(32), torch.empty(4, 3, 8, 8, device="meta")
    machine = replearn.costs.named_machine("T4")
    plan = replearn.plan(model, budget=budget, example=images, machine=machine)
    (wanted,) = replearn.costs.budgets.as_budgets(budget)
    promise = replearn.costs.estimate(model, images, plan, machine=machine)
    assert wanted.measure(promise.after.total) <= wanted.limit(promise.before.total)
    deployed = replearn.deploy(replearn.replace_(model, plan).eval(), fold="operators")
    assert sum(p.numel() for p in deployed.parameters()) == plan.deployed_after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "flops<=80%"}, "budget='flops<=80%' needs an example"),
        ({"budget": "latency<=80%", "example": torch.ones(1)}, "budget='latency<=80%' needs to know the machine"),
        ({"budget": "blocks=0"}, "budget='blocks=0': write a number of blocks from 1 on"),
        ({"budget": "blocks<=3"}, "budget='blocks<=3' can't be read"),
        ({"budget": "blocks=9"}, "can go. Ask for less"),
        ({"score": "similarity", "data": torch.ones(1)}, "give budget= too"),
    ],
)
def test_a_budget_that_cant_be_honoured_names_its_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplearnError, match=message):
        replearn.plan(staged(5), **arguments)
