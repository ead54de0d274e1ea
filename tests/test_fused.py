"""The fused kernels against the plain arithmetic: in Triton's interpreter here, for real on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreting import HERE, runs_kernels
from torch import Tensor, nn

import replearn
from replearn import operators
from replearn.fast.synthesis import ahead as synthesizing
from replearn.fast.synthesis import fused
from replearn.fast.synthesis.ahead import synthesized_on_demand
from replearn.fast.synthesis.batch import Batch
from replearn.operators._base.mixture import Mixture


def mixture(
    *shape: int,
    along: Any = "all",
    sides: int = 2,
    coefficients: bool = True,
    corrected: bool = False,
    channels_last: bool = False,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Mixture:
    def weight() -> nn.Parameter:
        made = torch.randn(*shape, device=HERE, dtype=dtype)
        if channels_last:
            made = made.contiguous(memory_format=torch.channels_last)
        return nn.Parameter(made)

    def coefficient() -> Tensor | None:
        count = {"all": 1, "rows": shape[0], "heads": 4}[along]
        return torch.randn(count, device=HERE, requires_grad=True) if coefficients else None

    return Mixture(
        previous=weight(), next=weight() if sides == 2 else None, a=coefficient(),
        b=coefficient() if sides == 2 else None, correction=weight() if corrected else None, along=along, **how,
    )  # fmt: skip


def every() -> list[Mixture]:
    return [
        mixture(8, 8, 3, 3, along="rows", normalise=True),
        mixture(16, 8, 3, 3, along="rows", normalise=True, channels_last=True, corrected=True),
        mixture(12, 16, along="heads", normalise=True, scale=0.25, corrected=True),
        mixture(12, 12),
        mixture(12),
        mixture(12, coefficients=False, factor=0.5),
        mixture(6, 40, along="rows", normalise=True, sides=1),
        mixture(3, 2100, coefficients=False, normalise=True, factor=0.5),  # rows longer than a block
    ]


def mix(mixtures: list[Mixture], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return fused.mix(Batch(mixtures), dtype)


def gradients(made: list[Tensor] | tuple[Tensor, ...], mixtures: list[Mixture]) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(1)
    ahead = [torch.randn(t.shape, generator=generator).to(t) for t in made]
    return torch.autograd.grad(made, [t for m in mixtures for t in m.tensors], ahead, allow_unused=True)


@runs_kernels
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("value", [0.0, 1e-41, 1e-25, 1e15, float("inf"), float("nan")])
def test_kernels_treat_odd_values_as_the_plain_arithmetic_does(value: float, normalise: bool) -> None:
    torch.manual_seed(0)
    odd = mixture(4, 6, along="rows", normalise=normalise)
    assert odd.previous is not None and odd.next is not None and odd.b is not None  # noqa: PT018
    with torch.no_grad():
        odd.previous[1] = value
        odd.next[2, 3] = value
        odd.b.zero_()
    made, plain = mix([odd], torch.float32), [odd.plain()]
    torch.testing.assert_close(made[0], plain[0], equal_nan=True)
    if abs(value) <= 1e15:  # else the formula has no gradient there
        for one, other in zip(gradients(made, [odd]), gradients(plain, [odd]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("which", [*range(8), "together"])
def test_kernels_equal_the_plain_arithmetic_both_ways(which: int | str) -> None:
    torch.manual_seed(0)
    mixtures = every() if which == "together" else [every()[int(which)]]
    assert all(map(fused.fusable, mixtures))
    made, plain = mix(mixtures, torch.float32), [m.plain() for m in mixtures]
    for one, other in zip(made, plain, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    for one, other in zip(gradients(made, mixtures), gradients(plain, mixtures), strict=True):
        torch.testing.assert_close(one, other)


@runs_kernels
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_is_made_in_float32_and_cast_once(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    one = mixture(8, 8, 3, 3, along="rows", normalise=True, dtype=stored)
    made = mix([one], torch.bfloat16)[0]
    assert made.dtype is torch.bfloat16
    # one unit of bfloat16: the interpreter cuts digits off where a GPU rounds
    torch.testing.assert_close(made.float(), one.plain(), rtol=2**-7, atol=0)


@runs_kernels
def test_a_weight_that_got_no_gradient_has_none_to_give() -> None:
    mixtures = every()[:4]
    made = mix(mixtures, torch.float32)
    tensors = [tensor for m in mixtures for tensor in m.tensors]
    found = torch.autograd.grad(made[1].sum(), tensors, allow_unused=True)
    expected = torch.autograd.grad(mixtures[1].plain().sum(), tensors, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@runs_kernels
def test_gradients_of_a_tensor_in_several_places_are_added() -> None:
    torch.manual_seed(0)
    one, two = mixture(8, 8, along="rows", normalise=True), mixture(8, 8, along="rows", normalise=True)
    shared = [one, replace(two, previous=one.next, a=one.a), replace(two, next=one.next)]
    shared += [Mixture(previous=one.next), Mixture(previous=two.previous)]
    made, plain = mix(shared, torch.float32), [m.plain() for m in shared]
    tensors = list({id(t): t for m in shared for t in m.tensors}.values())
    ahead = [torch.randn_like(t) for t in made]
    found, expected = (torch.autograd.grad(side, tensors, ahead) for side in (made, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@runs_kernels
def test_changing_a_source_before_the_backward_pass_is_noticed() -> None:
    one = mixture(4, 6, along="rows", normalise=True)
    made = mix([one], torch.float32)[0]
    with torch.no_grad():
        one.previous.add_(1)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()


def test_what_the_kernel_does_not_take() -> None:
    assert fused.fusable(mixture(4, 6))
    assert not fused.fusable(Mixture(previous=torch.randn(6, 4).t(), a=torch.ones(1)))
    assert not fused.fusable(Mixture(previous=torch.randn(3, 3, dtype=torch.float64)))
    assert not fused.fusable(Mixture(correction=torch.randn(3, 3)))


@runs_kernels
def test_a_model_is_prepared_once_and_again_when_a_parameter_moves() -> None:
    torch.manual_seed(0)
    model = replearn.models.CifarResNet(20, width=4).to(HERE).eval()
    replearn.replace_(model, replearn.plan(model, 2))
    x = torch.randn(2, 3, 8, 8, device=HERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def step() -> None:
        model.zero_grad()
        with synthesized_on_demand(model):
            together = model(x)
        seen.append(synthesizing._prepared[model])
        assert seen[-1].batch is not None
        torch.testing.assert_close(together, model(x))
        together.square().mean().backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().mean().backward()
        for one, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, p.grad)
        optimizer.step()

    step()
    step()  # new values in the same memory
    assert seen[0] is seen[1]
    block = model.layer1[0]
    block.conv2.weight.data = block.conv2.weight.data.clone()
    step()
    block.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False, device=HERE)
    step()
    assert len(set(map(id, seen))) == 3


# ---- all operators of a model at once ---------------------------------------------------------------------------


def replaced() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = replearn.models.CifarResNet(20, width=8)
    replearn.replace_(model, replearn.plan(model, 2))
    return model.to(HERE), torch.randn(2, 3, 16, 16, device=HERE)


@runs_kernels
def test_weights_made_together_are_the_operators_own_and_gone_after() -> None:
    model, x = replaced()
    model.eval()
    with synthesized_on_demand(model):
        together = model(x)
        with torch.no_grad():
            for operator in (m for m in model.modules() if hasattr(m, "mixtures")):
                operator.a.add_(1)  # the weights are made already
        assert torch.equal(model(x), together)
    assert not torch.equal(model(x), together)
    model.zero_grad()
    with synthesized_on_demand(model):
        model(x).sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).sum().backward()
    for one, other in zip(found, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@runs_kernels
def test_weights_made_in_another_precision_are_not_used() -> None:
    model, x = replaced()
    model.eval()
    with torch.autocast(HERE, torch.bfloat16):
        expected = model(x)
    with synthesized_on_demand(model):
        model(x)  # made in float32
        with torch.autocast(HERE, torch.bfloat16):
            assert torch.equal(model(x), expected)


@runs_kernels
def test_a_composed_operator_gets_the_weights_of_both_halves() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(HERE).eval()
    replearn.replace_(model, replearn.plan(model, 2, operator=operators.AttentionMLP(attention="head_wise")))
    x = torch.randn(2, 5, 16, device=HERE)
    with synthesized_on_demand(model):
        together = model(x)
    assert len(synthesizing._prepared[model].make()) == 2
    torch.testing.assert_close(together, model(x))


@runs_kernels
def test_a_model_with_a_weight_that_the_kernel_does_not_take_makes_its_own() -> None:
    model, x = replaced()
    low_rank = replearn.models.CifarResNet(20, width=8)
    replearn.replace_(low_rank, replearn.plan(low_rank, 2, operator=operators.Basic(correction="low-rank")))
    for each in (model.double(), low_rank.to(HERE)):
        assert synthesizing.prepare(each).batch is None
        with synthesized_on_demand(each):
            each(x.to(next(each.parameters()).dtype)).sum().backward()


# ---- on a GPU ---------------------------------------------------------------------------------------------------


def steps_of(backend: Any) -> Tensor:
    from replearn.experiments.bench.cases import SGD, Case, candidates
    from replearn.experiments.bench.steps import TrainingStep, precision_of

    slow = replace(SGD, lr=0.002)  # at a large rate on random labels, rounding alone decides where training goes
    case = Case(model="cifar_resnet:20:16", batch_size=64, interval=2, optimizer=slow)
    side = next(side for side in candidates(case) if side.label == "RepL")
    with precision_of(backend):
        step = TrainingStep(case, side, backend, torch.device("cuda"))
        found = []
        for _ in range(50):
            step()
            found.append(step.loss.clone())
        return torch.stack(found)


@pytest.mark.cuda
@pytest.mark.skipif(HERE == "cpu", reason="needs a GPU")
def test_fifty_steps_with_kernels_are_fifty_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {backend: steps_of(backend) for backend in ("tf32", "bf16", "captured")}
    monkeypatch.setattr(synthesizing, "fusable", lambda mixture: False)
    for backend, losses in ours.items():
        torch.testing.assert_close(losses, steps_of(backend), rtol=0.02, atol=0.02)
    torch.testing.assert_close(ours["captured"], ours["bf16"], rtol=0.02, atol=0.02)


@pytest.mark.cuda
@pytest.mark.skipif(HERE == "cpu", reason="needs a GPU")
def test_a_model_makes_all_its_weights_in_one_launch() -> None:
    from torch.profiler import ProfilerActivity, profile

    model = replearn.models.resnet32()
    replearn.replace_(model, replearn.plan(model, 4))
    model.cuda()
    x = torch.randn(4, 3, 32, 32, device="cuda")
    with synthesized_on_demand(model):
        model(x).sum().backward()  # compiles the kernels
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        with synthesized_on_demand(model):
            loss = model(x).sum()
        loss.backward()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in found.key_averages()}
    assert counts["forward_kernel"] == 1
    assert counts["backward_kernel"] == 1


@runs_kernels
def test_tables_and_sums_are_in_float32_whatever_the_default_is() -> None:
    torch.manual_seed(0)
    one = mixture(8, 8, along="rows", normalise=True, factor=0.5)
    ahead = torch.randn(8, 8, device=HERE)
    expected = torch.autograd.grad(one.plain(), one.tensors, ahead)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = torch.autograd.grad(mix([one], torch.float32)[0], one.tensors, ahead)
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
