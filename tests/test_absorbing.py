"""Operators taken up by the layer before them in a flat graph: equal outputs and no operation of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import count
from torch import Tensor, nn
from zoo import ZOO, apart, outputs, shake_

import replearn
from replearn import operators
from replearn.deployment.absorb import ABSORBED, absorb_, match_of
from replearn.fast.inlining import flatten, note_values_
from replearn.surgery.replace import operators_of

TAKING = (
    *("timm_vit", "timm_vit_scaled", "timm_vit_swiglu_packed", "timm_vit_swiglu_norm", "timm_deit", "timm_beit"),
    *("timm_cait", "timm_eva", "timm_relpos", "timm_xcit", "torchvision_vit", "declared_tuple"),
)


def taken_up(model: nn.Module, batch: Any) -> Any:
    """The flat graph with its operators taken up, as under autocast, but in full precision."""
    names = [name for name, _ in operators_of(model)]
    return absorb_(flatten(replearn.deploy(model), batch), names, batch, None)


@pytest.mark.parametrize("name", TAKING)
def test_the_layer_before_takes_an_operator_up(name: str) -> None:
    model, batch = ZOO[name].replaced(operators.Projection(correction="full")), ZOO[name].batch()
    before = outputs(model, batch)
    plain = taken_up(model, batch)
    assert len(plain.meta[ABSORBED]) == 1
    assert not any(key.startswith(("blocks_1_", "layers_1_")) for key in plain.state_dict())
    for one, other in zip(before, outputs(plain, batch), strict=True):
        assert apart(one, other) < 1e-5
    fine, wide = copy.deepcopy(model).double(), batch.double()
    for one, other in zip(outputs(fine, wide), outputs(taken_up(fine, wide), wide), strict=True):
        assert apart(one, other) < 1e-12
    for one, other in zip(before, outputs(model, batch), strict=True):
        assert torch.equal(one, other)  # the given model is as it was


def test_an_operator_taken_up_costs_a_product_of_its_own() -> None:
    torch.manual_seed(0)
    base, images = ZOO["timm_vit"].fresh(), torch.randn(1, 3, 8, 8)
    removed, kept = (
        replearn.replace_(copy.deepcopy(base), replearn.plan(base, first=2, operator=options)).eval()
        for options in (operators.Removal(), operators.Projection())
    )
    one, other = (
        count(replearn.deploy(model, images, merge=True, flatten=True, dtype=torch.bfloat16), images)
        for model in (removed, kept)
    )
    assert other.launches - one.launches == 3  # u is rounded, multiplied and added; one kernel does it on a GPU
    beside = count(replearn.deploy(kept, images, flatten=True), images)
    assert other.flops == beside.flops  # it has not become less work
    assert one.module_calls == other.module_calls == 1


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_scaled", "declared_tuple"])
def test_under_autocast_the_stream_stays_in_float32(name: str) -> None:
    model, batch = ZOO[name].replaced(), ZOO[name].batch()
    rough: Any = replearn.deploy(model, dtype=torch.bfloat16)
    taken: Any = replearn.deploy(model, batch, merge=True, flatten=True, dtype=torch.bfloat16)
    assert len(taken.model.meta[ABSORBED]) == 1
    precise = outputs(model, batch)
    far = [max(map(apart, precise, outputs(form, batch))) for form in (rough, taken)]
    assert far[1] < 2 * far[0] + 4e-3  # no more than what rounding in bfloat16 moves a sum by
    note_values_(taken.model, batch, torch.bfloat16)
    nodes = taken.model.graph.nodes
    sums = [node for node in nodes if "add" in str(node.target) and node.meta["value"].dim() == 3]
    streams = [node.meta["value"].dtype for node in sums if node.op != "call_method"]
    assert set(streams) == {torch.float32}
    assert apart(outputs(taken, batch[:1])[0], outputs(taken, batch)[0][:1]) < 2e-2
    taken(batch).sum().backward()


def test_where_sums_stay_under_autocast_an_operator_does_too() -> None:
    model, batch = ZOO["timm_vit_post_norm"].replaced(), ZOO["timm_vit_post_norm"].batch()
    plain: Any = replearn.deploy(model, batch, merge=True, flatten=True, dtype=torch.bfloat16)
    assert plain.model.meta[ABSORBED] == ()


def test_several_operators_are_taken_up_each_by_its_own_layer() -> None:
    model: Any = ZOO["timm_vit"].fresh()
    model.blocks = nn.Sequential(*(copy.deepcopy(block) for block in (*model.blocks, *model.blocks)))
    shake_(model, 0.1)
    options = operators.AttentionMLP()  # gives its first part away
    replearn.replace_(model, replearn.plan(model, first=2, interval=2, operator=options)).eval()
    shake_(model, 0.02)
    x = ZOO["timm_vit"].batch()
    plain = taken_up(model, x)
    assert plain.meta[ABSORBED] == tuple(f"blocks.{n + 1} -> blocks.{n}.mlp.fc2" for n in (0, 2, 4))
    assert apart(outputs(model, x)[0], outputs(plain, x)[0]) < 1e-5


class Ends(nn.Module):
    """A block with a way to end, and a linear map after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(4, 8), nn.Linear(8, 4)
        self.gamma, self.after, self.idle = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.Dropout()
        self.grid, self.wide, self.rough = (
            nn.Parameter(torch.randn(3, 4)),
            nn.Linear(4, 6),
            nn.Linear(4, 4).bfloat16(),
        )

    def forward(self, x: Tensor) -> Any:
        v = self.down(F.gelu(self.up(x)))
        ways: dict[str, Callable[[], Any]] = {
            "turned": lambda: v + x,
            "method": lambda: x.add(v),
            "scaled": lambda: x + 0.5 * (self.gamma * self.idle(v)),
            "in place": lambda: x + v.mul_(self.gamma),
            "activated": lambda: x + F.relu(v),
            "weighted": lambda: torch.add(x, v, alpha=2),
            "twice": lambda: v + v,
            "used": lambda: x + v + v.mean(),
            "read": lambda: x * self.down.weight.sum() + v,
            "spread": lambda: x + self.down(F.gelu(self.up(x.mean(1, keepdim=True)))),
            "tokens": lambda: x + self.grid * v,
            "keyword": lambda: x + torch.mul(v, other=self.gamma),
            "half": lambda: x + self.rough(x.bfloat16()),
        }
        y = ways.get(self.how, lambda: x + v)()
        mapped = self.wide(y) if self.how == "wide" else self.after(y)
        z = mapped if self.how == "wide" else y + mapped
        seen = {"seen": y, "layer seen": v, "map seen": mapped}.get(self.how)
        return z if seen is None else z * seen


def matched(block: Ends) -> Any:
    x = torch.randn(2, 3, 4)
    flat = flatten(block.eval(), x)
    note_values_(flat, x, None)
    last = [node for node in flat.graph.nodes if node.target is F.linear][-1]
    return match_of(flat, last)


@pytest.mark.parametrize("how", ["plain", "turned", "method", "scaled", "in place"])
def test_blocks_whose_sum_takes_a_map_up(how: str) -> None:
    block = Ends(how)
    match = matched(block)
    mixing = block.after.weight + torch.eye(4)
    scale = {"scaled": 0.5 * block.gamma, "in place": block.gamma}.get(how, torch.ones(4))
    torch.testing.assert_close(match.weight, mixing @ (scale[:, None] * block.down.weight))
    torch.testing.assert_close(match.bias, mixing @ (scale * block.down.bias) + block.after.bias)
    with torch.no_grad():
        block.down.weight.fill_(3e38)
        block.after.weight.fill_(3e38)
    assert matched(block) is None  # the product is no number


def test_blocks_that_others_see_or_that_end_otherwise_stay() -> None:
    ends = ["activated", "weighted", "twice", "used", "read", "spread", "tokens", "keyword", "half"]
    for how in (*ends, "wide", "seen", "layer seen", "map seen"):
        assert matched(Ends(how)) is None, how


@pytest.mark.parametrize(("name", "taken"), [("after", ("after -> down",)), ("aft", ())])
def test_an_operator_is_known_by_its_whole_name(name: str, taken: tuple[str, ...]) -> None:
    x = torch.randn(2, 3, 4)
    flat = absorb_(flatten(Ends("plain").eval(), x), [name], x, None)
    assert flat.meta[ABSORBED] == taken


def test_shared_weights_are_left_alone() -> None:
    model: Any = ZOO["timm_vit"].replaced()
    model.blocks[3].mlp.fc2.weight = model.blocks[0].mlp.fc2.weight
    assert taken_up(model, ZOO["timm_vit"].batch()).meta[ABSORBED] == ()
