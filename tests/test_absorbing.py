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
from replearn.deployment import absorb
from replearn.deployment.absorb import ABSORBED, absorb_, match_of
from replearn.fast.inlining import flatten, note_values_

TAKING = (
    *("timm_vit", "timm_vit_scaled", "timm_vit_swiglu_packed", "timm_vit_swiglu_norm", "timm_deit", "timm_beit"),
    *("timm_cait", "timm_eva", "timm_relpos", "timm_xcit", "torchvision_vit", "declared_tuple"),
)


@pytest.fixture(params=[True, False], ids=["few", "many"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to compute the product."""
    if not request.param:
        monkeypatch.setattr(absorb, "FEW", 0)
    return bool(request.param)


@pytest.mark.parametrize("name", TAKING)
def test_the_layer_before_takes_an_operator_up(name: str, few: bool) -> None:
    model, batch = ZOO[name].replaced(operators.Projection(correction="full")), ZOO[name].batch()
    before = outputs(model, batch)
    plain: Any = replearn.deploy(model, batch, merge=True, flatten=True)
    assert len(plain.meta[ABSORBED]) == 1
    assert not any(key.startswith(("blocks_1_", "layers_1_")) for key in plain.state_dict())
    for one, other in zip(before, outputs(plain, batch), strict=True):
        assert apart(one, other) < 1e-5
    fine, wide = copy.deepcopy(model).double(), batch.double()
    form = replearn.deploy(fine, wide, merge=True, flatten=True)
    for one, other in zip(outputs(fine, wide), outputs(form, wide), strict=True):
        assert apart(one, other) < 1e-12
    for one, other in zip(before, outputs(model, batch), strict=True):
        assert torch.equal(one, other)  # the given model is as it was


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_operator_taken_up_costs_nothing_of_its_own(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    base, images = ZOO["timm_vit"].fresh(), torch.randn(1, 3, 8, 8)
    removed, kept = (
        replearn.replace_(copy.deepcopy(base), replearn.plan(base, first=2, operator=options)).eval()
        for options in (operators.Removal(), operators.Projection())
    )
    one, other = (
        count(replearn.deploy(model, images, merge=True, flatten=True, dtype=dtype), images)
        for model in (removed, kept)
    )
    # under autocast u is rounded for a product of its own, of rows
    assert other.launches - one.launches == (0 if dtype is None else 2)
    assert other.dispatches - one.dispatches == (0 if dtype is None else 5)
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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_compiled_code_is_given_what_a_compiler_can_join(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorb, "FEW", 0)
    model, batch = ZOO["timm_vit"].replaced(), ZOO["timm_vit"].batch()
    eager, compiled = (
        replearn.deploy(model, batch, merge=True, flatten=True, dtype=dtype, compile=compile)
        for compile in (False, True)
    )
    graphs = [form.graph if dtype is None else form.model.graph for form in (eager, compiled)]
    products = [[node.target for node in graph.nodes if node.target in (torch.cat, "addmm_")] for graph in graphs]
    assert products[0][1:] == ["addmm_"]  # a class token is put before the others first
    assert products[1][1:] == ([] if dtype is None else [torch.cat])  # in float32 two products, added
    with torch.compiler.set_stance("force_eager"):
        one, other = outputs(eager, batch)[0], outputs(compiled, batch)[0]
        assert apart(one, other) < (1e-5 if dtype is None else 2e-2)
        assert other.dtype is one.dtype
        compiled(batch).sum().backward()


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
    plain: Any = replearn.deploy(model, x, merge=True, flatten=True)
    assert plain.meta[ABSORBED] == tuple(f"blocks.{n + 1} -> blocks.{n}.mlp.fc2" for n in (0, 2, 4))
    assert apart(outputs(model, x)[0], outputs(plain, x)[0]) < 1e-5


def test_a_users_own_autocast_still_works(few: bool) -> None:
    model, x = ZOO["timm_vit"].replaced(), ZOO["timm_vit"].batch()
    plain = replearn.deploy(model, x, merge=True, flatten=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        given, found = model(x), plain(x)
    assert apart(given.float(), found.float()) < 2e-2


class Ends(nn.Module):
    """A block with a way to end, and a linear map after it."""

    def __init__(self, how: str, merged: bool = True) -> None:
        super().__init__()
        self.how, self.merged, self.up, self.down = how, merged, nn.Linear(4, 8), nn.Linear(8, 4)
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
        z = mapped if self.merged or self.how == "wide" else y + mapped
        seen = {"seen": y, "layer seen": v, "map seen": mapped}.get(self.how)
        return z if seen is None else z * seen


def matched(block: Ends) -> Any:
    x = torch.randn(2, 3, 4)
    flat = flatten(block.eval(), x)
    note_values_(flat, x, None)
    last = [node for node in flat.graph.nodes if node.target is F.linear][-1]
    return match_of(flat, last)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("how", ["plain", "turned", "method", "scaled", "in place"])
def test_blocks_whose_sum_takes_a_map_up(how: str, merged: bool) -> None:
    block = Ends(how, merged)
    match = matched(block)
    mixing = block.after.weight + (0 if merged else torch.eye(4))
    scale = {"scaled": 0.5 * block.gamma, "in place": block.gamma}.get(how, torch.ones(4))
    torch.testing.assert_close(match.weight, mixing @ (scale[:, None] * block.down.weight))
    torch.testing.assert_close(match.bias, mixing @ (scale * block.down.bias) + block.after.bias)
    with torch.no_grad():
        block.down.weight.fill_(3e38)
        block.after.weight.fill_(3e38)
    assert matched(block) is None  # the product is no number


def test_blocks_that_others_see_or_that_end_otherwise_stay() -> None:
    ends = ["activated", "weighted", "twice", "used", "read", "spread", "tokens", "keyword", "half"]
    for how in (*ends, "wide", "seen", "layer seen"):
        assert matched(Ends(how)) is None, how
        assert matched(Ends(how, merged=False)) is None, how
    assert matched(Ends("map seen", merged=False)) is None


@pytest.mark.parametrize(("name", "taken"), [("after", ("after -> down",)), ("aft", ())])
def test_an_operator_is_known_by_its_whole_name(name: str, taken: tuple[str, ...]) -> None:
    x = torch.randn(2, 3, 4)
    flat = absorb_(flatten(Ends("plain").eval(), x), [name], x, None, compiled=False)
    assert flat.meta[ABSORBED] == taken


def test_shared_weights_are_left_alone() -> None:
    model: Any = ZOO["timm_vit"].replaced()
    model.blocks[3].mlp.fc2.weight = model.blocks[0].mlp.fc2.weight
    plain: Any = replearn.deploy(model, ZOO["timm_vit"].batch(), merge=True, flatten=True)
    assert plain.meta[ABSORBED] == ()
