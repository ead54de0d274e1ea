"""Operators taken up into the block before them: equal outputs and no launch of their own, or a reason."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ZOO, Scaled, outputs, shake_

import replearn
from replearn import operators
from replearn.absorbing import absorption_of
from replearn.anatomy import anatomy
from replearn.bench.inference_counts import count
from replearn.ending import Ending, ending_of
from replearn.surgery import plan_of
from replearn.surroundings import Surroundings
from replearn.tracing import certain_trace, trace

TAKING = (
    *("timm_vit", "timm_vit_scaled", "timm_vit_swiglu_packed", "timm_vit_swiglu_norm", "timm_deit", "timm_beit"),
    *("timm_cait", "timm_eva", "timm_relpos", "timm_xcit", "torchvision_vit", "declared_tuple"),
)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))


def absorbed(name: str = "timm_vit") -> tuple[nn.Module, Any, Any]:
    """A replaced model, a batch, and its deployed form with every operator taken up."""
    model, batch = ZOO[name].replaced(operators.Projection(correction="full")), ZOO[name].batch()
    assert all(merge.into for merge in replearn.find_merges(model))
    return model, batch, replearn.deploy(model, batch, merge=True)


@pytest.mark.parametrize("name", TAKING)
def test_the_block_before_takes_an_operator_up(name: str) -> None:
    model, batch, plain = absorbed(name)
    before = outputs(model, batch)
    for one, other in zip(before, outputs(plain, batch), strict=True):
        assert apart(one, other) < 1e-5
    (target,) = plan_of(model).targets
    assert not list(plain.get_submodule(target.name).parameters())
    fine = copy.deepcopy(model).double()
    wide = batch.double()
    for one, other in zip(outputs(fine, wide), outputs(replearn.deploy(fine, merge=True), wide), strict=True):
        assert apart(one, other) < 1e-12
    for one, other in zip(before, outputs(model, batch), strict=True):
        assert torch.equal(one, other)  # the given model is as it was


def test_an_operator_taken_up_costs_no_launch() -> None:
    torch.manual_seed(0)
    base, images = ZOO["timm_vit"].fresh(), torch.randn(1, 3, 8, 8)
    forms: dict[str, list[int]] = {}
    for label, options in (("removal", operators.Removal()), ("projection", operators.Projection())):
        model = copy.deepcopy(base)
        replearn.replace_(model, replearn.plan(model, first=2, operator=options)).eval()
        forms[label] = [count(replearn.deploy(model, merge=True), images).launches]
        forms[label].append(count(replearn.deploy(model, merge=True, dtype=torch.bfloat16), images).launches)
    assert forms["projection"][0] == forms["removal"][0]
    assert forms["projection"][1] == forms["removal"][1] + 1  # v is brought to float32
    counts = count(replearn.deploy(model, merge=True), images)
    assert counts.flops == count(replearn.deploy(model), images).flops  # it has not become less work


def test_a_composed_operator_gives_its_first_part_away() -> None:
    model, batch = ZOO["timm_vit"].replaced(operators.AttentionMLP()), ZOO["timm_vit"].batch()
    first, second = replearn.find_merges(model)
    assert str(first) == "blocks.1.body.0 -> blocks.0.mlp.fc2"
    assert second.layer is None
    plain: Any = replearn.deploy(model, batch, merge=True)
    assert type(plain.blocks[1].body[0]) is nn.Identity
    assert apart(outputs(model, batch)[0], outputs(plain, batch)[0]) < 1e-5


def test_sources_are_read_before_they_change() -> None:
    model = ZOO["timm_vit"].fresh()
    deep: Any = nn.Sequential(*(copy.deepcopy(block) for block in (*model.blocks, *model.blocks)))
    model.blocks = deep
    shake_(model, 0.1)
    replearn.replace_(model, replearn.plan(model, first=2, interval=2)).eval()  # block 2 is next and previous
    shake_(model, 0.02)
    assert [merge.into for merge in replearn.find_merges(model)] == [f"blocks.{n}.mlp.fc2" for n in (0, 2, 4)]
    x = ZOO["timm_vit"].batch()
    assert apart(outputs(model, x)[0], outputs(replearn.deploy(model, x, merge=True), x)[0]) < 1e-5


def test_the_deployed_form_copies_pickles_compiles_and_has_gradients() -> None:
    model, x, plain = absorbed()
    expected = outputs(plain, x)[0]
    saved = pickle.dumps(plain)
    assert b"replearn" not in saved  # it loads where this package is not installed
    again = copy.deepcopy(pickle.loads(saved))
    assert torch.equal(outputs(again, x)[0], expected)
    assert list(again.state_dict()) == list(plain.state_dict())
    kept = {key for key in model.state_dict() if not key.startswith("blocks.1.")}
    assert set(plain.state_dict()) - kept == {"blocks.0.stream_weight"}
    torch.compiler.reset()
    fast = torch.compile(plain, fullgraph=True, backend="aot_eager")
    assert apart(expected, outputs(fast, x)[0]) < 1e-5
    low = replearn.deploy(model, merge=True, dtype=torch.bfloat16)
    quick = torch.compile(low, fullgraph=True, backend="aot_eager")
    assert apart(outputs(low, x)[0], outputs(quick, x)[0]) < 2e-2
    plain(x).sum().backward()
    assert all(p.grad is not None for name, p in plain.named_parameters() if name.startswith("blocks.0."))


def test_a_users_own_autocast_and_mask_still_work() -> None:
    model, x, plain = absorbed()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        given, found = model(x), plain(x)
    assert apart(given, found) < 2e-2
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    with torch.no_grad():
        one, other, free = model(x, attn_mask=mask), plain(x, attn_mask=mask), plain(x)
    assert apart(one, other) < 1e-5
    assert apart(one, free) > 1e-3


class Ends(nn.Module):
    """A block with a way to end."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(4, 8), nn.Linear(8, 4)
        self.square, self.gamma, self.idle = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), nn.Dropout()

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Any:
        v = self.down(F.gelu(self.up(x)))
        ways: dict[str, Callable[[], Any]] = {
            "plain": lambda: x + v,
            "turned": lambda: v + x,
            "method": lambda: x.add(v),
            "scaled": lambda: x + 0.5 * (self.gamma * F.dropout(self.idle(v), training=self.training)),
            "tuple": lambda: (x + v,),
            "no sum": lambda: F.relu(x + v),
            "weighted": lambda: torch.add(x, v, alpha=2),
            "twice": lambda: v + v,
            "used": lambda: x + v + v.mean(),
            "activated": lambda: x + F.relu(v),
            "masked": lambda: x + v if mask is not None else x - v,
            "flagged": lambda: x + v if flag is not True else x - v,
            "again": lambda: x + self.square(self.square(x)),
            "read": lambda: x + v * self.down.weight.sum(),
            "weighed": lambda: x * self.down.weight.sum() + v,
            "pair": lambda: (x + v, v),
        }
        return ways[self.how]()


@pytest.mark.parametrize("how", ["plain", "turned", "method", "scaled", "tuple"])
def test_endings_that_are_proven(how: str) -> None:
    found = ending_of(Ends(how).eval())
    assert isinstance(found, Ending), found
    assert (found.linear, found.stream.name) == ("down", "x")
    assert len(found.scales) == (2 if how == "scaled" else 0)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no sum", "what it returns is no sum"),
        ("weighted", "what it returns is no sum"),
        ("pair", "what it returns is no sum"),
        ("twice", "both terms of its sum come from one layer"),
        ("used", "neither term of its sum comes from one Linear"),
        ("activated", "relu (call_function) lies on the way"),
        ("masked", "takes other ways without mask or flag"),
        ("flagged", "takes other ways without mask or flag"),
        ("again", "square is called more than once"),
        ("read", "neither term of its sum comes from one Linear"),
        ("weighed", "the weights of down are read by other code too"),
    ],
)
def test_endings_that_are_not(how: str, reason: str) -> None:
    assert reason in str(ending_of(Ends(how).eval()))


def test_dropout_at_work_is_no_identity() -> None:
    assert "neither term" in str(ending_of(Ends("scaled").train()))


def spoiled(change: Callable[[Any], None]) -> str:
    """Why a ViT's operator is not taken up after a change to the replaced model; its outputs stay right."""
    model, x = ZOO["timm_vit"].replaced(), ZOO["timm_vit"].batch()
    change(model)
    (merge,) = replearn.find_merges(model)
    assert merge.layer == "Linear"
    assert merge.into is None
    assert apart(outputs(model, x)[0], outputs(replearn.deploy(model, x, merge=True), x)[0]) < 1e-5
    assert merge.reason in str(merge)
    return merge.reason


class Narrow(nn.Linear):
    pass


class Mean(nn.Module):
    """Adds the same to every token."""

    def __init__(self, fc: nn.Linear) -> None:
        super().__init__()
        self.fc = fc

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.mean(1, keepdim=True))
        return out


def tap(model: Any) -> None:
    """Have the model return the sum of two of its blocks' results."""
    kind = type(model)

    class Tapped(kind):  # type: ignore[misc, valid-type]
        def forward_features(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
            first = self.blocks[0](self.norm_pre(self._pos_embed(self.patch_embed(x))))
            out: Tensor = self.norm(self.blocks[2](self.blocks[1](first)) + first)
            return out

    model.__class__ = Tapped


def share(model: Any) -> None:
    model.blocks[3].mlp.fc2.weight = model.blocks[0].mlp.fc2.weight


def exchange(model: Any, made: Callable[[Any], nn.Module]) -> None:
    model.blocks[0].mlp = made(model.blocks[0].mlp).eval()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (share, "the weights of blocks.0.mlp.fc2 are shared with another part of the model"),
        (lambda m: setattr(m, "extra", m.blocks[0].mlp), "blocks.0.mlp is shared with another part of the model"),
        (
            lambda m: m.blocks[0].mlp.fc2.register_forward_hook(lambda *given: None),
            "blocks.0.mlp.fc2 has hooks, which would see other values",
        ),
        (lambda m: m.blocks[0].drop_path2.register_forward_pre_hook(lambda *given: None), "drop_path2 has hooks"),
        (lambda m: m.blocks[0].register_forward_hook(lambda *given: None), "blocks.0 has hooks"),
        (tap, "the model does more with its result than to give it to blocks.1"),
        (lambda m: exchange(m, lambda mlp: Mean(nn.Linear(16, 16))), "what it adds has the shape (2, 1, 16)"),
        (lambda m: exchange(m, lambda mlp: Narrow(16, 16)), "neither term of its sum comes from one Linear"),
        (lambda m: exchange(m, lambda mlp: nn.Linear(16, 1)), "mlp gives 1 features"),
    ],
)
def test_what_others_see_is_left_alone(change: Callable[[Any], None], reason: str) -> None:
    assert reason in spoiled(change)


def test_what_is_added_may_not_depend_on_more_than_the_stream() -> None:
    class Across(Scaled):
        def forward(self, hidden: Tensor, scale: Any = 1.0) -> Tensor:  # type: ignore[override]
            return self.attention(hidden) + self.down(self.act(self.up(hidden)))

    model, kind = nn.Sequential(Across(), nn.Identity()).eval(), anatomy("a", "transformer")
    told = absorption_of(Surroundings(model), "1", "0", kind, nn.Linear(16, 16))
    assert told == "0: what it adds is computed from hidden too"
    told = absorption_of(Surroundings(model), "1", "9", kind, nn.Linear(16, 16))
    assert told == "no kept block 9 stands before it"


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        (lambda self, x: self.inner(x), None),
        (lambda self, x: self.inner(x) + self.inner.layers[0](x), "0: the model uses it as well"),
        (
            lambda self, x: self.inner(x) if x.sum() > 0 else self.inner.layers[0](x),
            "0: the model can't be traced and may use it as well",
        ),
    ],
)
def test_code_further_out_is_asked_too(outer: Callable[..., Tensor], told: str | None) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Ends("plain"), nn.Identity()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        forward = outer

    around, kind = Surroundings(Outer().eval()), anatomy("a", "transformer")
    found = absorption_of(around, "inner.layers.1", "inner.layers.0", kind, nn.Linear(4, 4))
    assert (found == f"inner.layers.{told}") if told else not isinstance(found, str)


def test_a_trace_of_sizes_and_buffers_does_not_end_the_process() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(8))

        def forward(self, x: Tensor, height: int, width: int = 2) -> Tensor:
            rows = torch.arange(1, height + 1, device=x.device).float()
            return self.table[: x.shape[1]] + torch.zeros(width, x.shape[1]) + rows.sum() + x

    assert not isinstance(trace(Sizes()), str)
    assert not isinstance(certain_trace(Sizes()), str)

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(3).expand(x.shape[0], 3) + x

    assert "TypeError" in str(trace(Constant()))
