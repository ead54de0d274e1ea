"""The plan: frozen data, an exact JSON round trip, a strict reader, and the printed table."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import replearn
from replearn import Plan, ReplearnError, operators
from replearn.operators._base.options import Options

# ---- every operator with every option -----------------------------------------------------------


def values_of(field: dataclasses.Field[Any], hint: Any) -> list[Any]:
    """Some values of an option that its type allows, the default among them."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if hint is bool:
        return [True, False]
    if field.name == "rank":
        return [1, 2]
    if field.name == "start":
        return ["mean", "previous", "zero", 0, -1, 0.1, 1e-45, 2**53 + 1]
    raise AssertionError(f"say here which values to try for the new option {field.name}")


def variants(kind: type[Options]) -> Iterator[Options]:
    """The defaults, and each option changed alone; with a correction where nothing else is left."""
    hints = get_type_hints(kind, localns={"Kind": str})
    yield kind()
    for field in dataclasses.fields(kind):
        for value in values_of(field, hints[field.name]):
            try:
                yield kind(**{field.name: value})
            except ReplearnError:
                yield kind(**{field.name: value, "correction": "full"})


# these read a norm or nothing else, and so refuse to read nobody; test_errors.py has the texts
READERS = (operators.MLP, operators.HeadWise, operators.AttentionMLP, operators.WholeBlock)
ALL_OPTIONS = [
    options
    for kind in operators.available().values()
    for options in variants(kind)
    if not (isinstance(options, READERS) and options.sources == "none")
]


@cache
def model_of(kind: str) -> nn.Module:
    builds = {"basic": tiny.resnet, "transformer": lambda: tiny.Tokens(5)}
    builds["bottleneck"] = lambda: nn.Sequential(*(tiny.Bottleneck(16) for _ in range(5)))
    builds["any"] = lambda: nn.Sequential(*(tiny.Own(4) for _ in range(5)))
    with torch.device("meta"):
        return builds[kind]()


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=repr)
def test_a_plan_survives_json_exactly(options: Options) -> None:
    plan = replearn.plan(model_of(options.kinds[0]), 2, first=2, operator=options)
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert hash(again) == hash(plan)
    assert str(again) == str(plan)
    assert [type(t.operator) for t in again.targets] == [type(options)] * len(plan.targets)
    assert repr(again) == repr(plan)  # 1 and 1.0 are equal, and still not the same


# ---- frozen -------------------------------------------------------------------------------------


@cache
def small_plan() -> Plan:
    with torch.device("meta"):
        return replearn.plan(tiny.resnet(), 2, first=2, operator=operators.Basic(correction="low-rank", rank=2))


def test_no_part_of_a_plan_can_be_changed() -> None:
    plan = small_plan()
    text = plan.to_json()
    target = plan.targets[0]
    for part in (plan, target, target.anatomy, target.reads[0], target.reads[0].part, target.operator):
        for field in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, field.name, None)
    with pytest.raises(TypeError):
        target.anatomy.parts["conv1"] = target.anatomy.parts["conv2"]  # type: ignore[index]
    assert plan.to_json() == text


def test_plans_are_keys_and_copies_of_them_are_equal() -> None:
    plan = small_plan()
    copies = [copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))]
    assert {plan: 1, **dict.fromkeys(copies, 2)} == {plan: 2}
    assert plan != dataclasses.replace(plan, num_blocks=10)


# ---- reading what strangers wrote ---------------------------------------------------------------


def data() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(small_plan().to_json())
    return read


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, item in inside for path in paths(item, (*here, key)))]


PATHS = paths(data())[1:]
nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["both", "basic", "layer1.1", "\ud800", "previous", "mean", "\x1b[31m", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def set_at(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def refused_or_plan(text: Any) -> Plan | None:
    """Reading must give a plan that is one, or a ReplearnError that can be shown; nothing else."""
    try:
        plan = Plan.from_json(text)
    except ReplearnError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert len(refused.encode()) < 1000
        return None
    assert Plan.from_json(plan.to_json()) == plan
    str(plan).encode()
    hash(plan)
    return plan


@given(path=st.sampled_from(PATHS), new=nested)
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_plan_with_one_value_exchanged_is_refused_or_whole(path: tuple[Any, ...], new: Any) -> None:
    mutated = data()
    set_at(mutated, path, new)
    refused_or_plan(json.dumps(mutated))


@given(cut=st.integers(0, 5000), flip=st.integers(0, 7), tail=st.binary(max_size=4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_plan_with_bytes_cut_or_flipped_is_refused_or_whole(cut: int, flip: int, tail: bytes) -> None:
    whole = small_plan().to_json().encode()
    cut %= len(whole)
    flipped = bytearray(whole)
    flipped[cut] ^= 1 << flip
    for damaged in (whole[:cut] + tail, bytes(flipped), flipped.decode(errors="replace")):
        refused_or_plan(damaged)


@pytest.mark.parametrize("depth", [50, 700, 900, 985, 3000])
@pytest.mark.parametrize("path", [("replearn_plan",), ("notes",), ("targets", 0, "operator", "sources")], ids=str)
def test_deep_nesting_is_refused_at_any_depth(path: tuple[Any, ...], depth: int) -> None:
    mutated = data()
    set_at(mutated, path, "@")
    assert refused_or_plan(json.dumps(mutated).replace('"@"', "[" * depth + "0" + "]" * depth)) is None


@given(
    path=st.sampled_from([p for p in PATHS if p[:1] == ("targets",) and len(p) > 2]),
    new=nested | st.integers(0, 9),
)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_readable_plan_of_a_stranger_is_carried_out_as_planned_or_not_at_all(path: Any, new: Any) -> None:
    mutated = data()
    set_at(mutated, path, new)
    plan = refused_or_plan(json.dumps(mutated))
    if plan is None:
        return
    with torch.device("meta"):
        model = tiny.resnet()
    before = list(model.modules())
    try:
        replearn.replace_(model, plan)
    except ReplearnError:
        assert list(model.modules()) == before
        assert not hasattr(model, "_replearn_plan")
        return
    # all that decides what is built is what planning on this model decides
    planned = {target.name: target for target in small_plan().targets}
    for target in plan.targets:
        mine = planned[target.name]
        assert dataclasses.replace(
            target, notes=(), parameters_before=0, parameters_deployed=None, operator=mine.operator
        ) == dataclasses.replace(mine, notes=(), parameters_before=0, parameters_deployed=None)


# ---- the printed table --------------------------------------------------------------------------

TABLE = """\
CifarResNet: 3 of 12 blocks replaced (interval=3, first=2)

module    position  operator                  sources              parameters  training  deployed
--------  --------  ------------------------  -------------------  ----------  --------  --------
layer1.1         2  basic (low-rank, rank=2)  layer1.0 + layer1.2         304        96       148
layer2.1         2  basic (low-rank, rank=2)  layer2.0 + layer2.2       1,184       192       584
layer3.1         2  basic (low-rank, rank=2)  layer3.0 + layer3.2       4,672       384     2,320

training 23,694 -> 18,206 trainable parameters (-23.2%)
deployed 23,694 -> 20,586 parameters (-13.1%)"""


def test_the_printed_table_is_this() -> None:
    model = tiny.resnet(26)
    plan = replearn.plan(model, 3, first=2, operator=operators.Basic(correction="low-rank", rank=2))
    assert str(plan) == TABLE


NOTED = """\
Sequential: 1 of 4 blocks replaced (interval=2, first=2)

module  position  operator     sources  parameters  training  deployed
------  --------  -----------  -------  ----------  --------  --------
1              2  whole_block  0 + 2            24         6        24

note     whole_block saves parameters, gradients and optimizer state while training, and nothing once deployed; operator='removal' does, and so does replearn.compress
note     no family knows these blocks; they were found by the generic scan
skipped  3 (position 4): last block of its stack: it has no next source
training 96 -> 78 trainable parameters (-18.8%)
deployed 96 -> 96 parameters (+0.0%)"""  # noqa: E501


def test_the_table_shows_notes_and_what_was_skipped() -> None:
    assert str(replearn.plan(nn.Sequential(*(tiny.Own(4) for _ in range(4))), 2, first=2)) == NOTED


def test_a_name_that_would_write_into_the_terminal_is_shown_escaped() -> None:
    mutated = data()
    mutated["targets"][0]["name"] = "layer\x1b[31m\n1"
    shown = str(Plan.from_json(json.dumps(mutated)))
    assert r"layer\x1b[31m\n1" in shown
    assert "\x1b" not in shown


def test_an_operator_that_saves_nothing_once_deployed_is_said_with_one_that_does() -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    paper, reduced = (replearn.plan(model, operator=operator) for operator in (None, "reduced_bottleneck"))
    assert paper.parameters_after < 0.8 * paper.parameters_before
    assert paper.deployed_after > 0.999 * paper.deployed_before
    assert "nothing once deployed; operator='reduced_bottleneck' does" in str(paper)
    assert reduced.deployed_after < 0.9 * reduced.deployed_before
    assert "nothing once deployed" not in str(reduced)


def test_many_tensors_of_one_side_are_one_note() -> None:
    timm = pytest.importorskip("timm")
    shown = str(replearn.plan(timm.create_model("efficientnet_b0")))
    assert shown.count("come from the next source alone") == 1
    assert "comes from the next source alone" not in shown
