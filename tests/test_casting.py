"""Weights that are cast together, in the launch of synthesis: in Triton's interpreter here, for real on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interpreting import HERE, INTERPRETED, interpret, runs_kernels
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import weight_norm
from torch.utils.checkpoint import checkpoint

import replearn
from replearn import operators
from replearn.experiments.bench.cases import Case, candidates
from replearn.experiments.bench.steps import TrainingStep, losses, precision_of
from replearn.fast.synthesis import ahead as synthesizing
from replearn.fast.synthesis import casting
from replearn.operators._base.mixture import HandOut, handed_out


@pytest.fixture(autouse=True)
def _kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (casting, synthesizing):
        monkeypatch.setattr(module, "kernels_run_on", lambda tensor: INTERPRETED or tensor.is_cuda)


@contextmanager
def low() -> Iterator[None]:
    with torch.autocast(HERE, torch.bfloat16, cache_enabled=False):
        yield


@torch.no_grad()
def round_(model: nn.Module) -> None:
    """Make its weights numbers of bfloat16: Triton's interpreter cuts digits off where a GPU rounds."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def resnet(replaced: bool = True) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = replearn.models.CifarResNet(20, width=4).to(HERE)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if replaced:
        replearn.replace_(model, replearn.plan(model, 2))
    round_(model)
    return model, torch.randn(2, 3, 8, 8, device=HERE).contiguous(memory_format=torch.channels_last)


def run(model: nn.Module, x: Tensor, cast: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    operators = any(synthesizing.operators_in(model))
    with low(), replearn.fast.synthesized(model, cast=cast) if cast or operators else low():
        made = model(x)
    made.float().square().mean().backward()
    return made.detach(), {name: p.grad for name, p in model.named_parameters()}


@runs_kernels
@pytest.mark.parametrize("replaced", [True, False])
def test_a_model_computes_the_same_both_ways(replaced: bool) -> None:
    model, x = resnet(replaced)
    expected, gradients = run(model, x, cast=False)
    made, found = run(model, x, cast=True)
    assert torch.equal(made, expected)
    for name, gradient in gradients.items():
        other = found[name]
        assert gradient is not None
        assert other is not None
        assert other.dtype is torch.float32
        assert other.stride() == model.get_parameter(name).stride()
        torch.testing.assert_close(other, gradient)


@runs_kernels
def test_layers_hold_cast_weights_inside_and_their_own_outside() -> None:
    model, x = resnet()
    own = dict(model.named_parameters())
    seen = []
    hook = model.layer1[0].conv1.register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    with low(), replearn.fast.synthesized(model, cast=True):
        assert model.fc.bias.dtype is torch.bfloat16
        assert model.bn1.weight is own["bn1.weight"]
        model(x)
    hook.remove()
    assert seen == [torch.bfloat16]
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
    with pytest.raises(ZeroDivisionError), low(), replearn.fast.synthesized(model, cast=True):
        _ = 1 / 0
    assert all(parameter is own[name] for name, parameter in model.named_parameters())


@runs_kernels
def test_a_model_is_prepared_once_and_again_when_a_layer_moves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8)).to(HERE)
    x = torch.randn(2, 3, 4, 4, device=HERE)
    round_(model)

    def check() -> synthesizing.Prepared:
        made, found = run(model, x, cast=True)
        found = {name: None if grad is None else grad.clone() for name, grad in found.items()}
        expected, gradients = run(model, x, cast=False)
        assert torch.equal(made, expected)
        torch.testing.assert_close(found, gradients)
        return synthesizing._prepared[model][True, True]

    first = check()
    with torch.no_grad():
        model[3].weight.mul_(2)  # new values in the same memory
    assert check() is first
    model[3].weight = nn.Parameter(model[3].weight.detach() / 2)
    assert check() is not first
    before = synthesizing._prepared[model][True, True]
    model[3] = nn.Linear(16, 8, device=HERE)
    round_(model)
    assert check() is not before


@runs_kernels
def test_a_weight_may_change_between_the_passes_as_under_autocast() -> None:
    model, x = resnet(replaced=False)
    with low(), replearn.fast.synthesized(model, cast=True):
        loss = model(x).sum()
    with torch.no_grad():
        model.fc.weight.zero_()
    loss.backward()
    assert model.conv1.weight.grad is not None


@runs_kernels
def test_layers_that_are_frozen_or_not_used_and_kernels_of_one_pixel() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 65, 1), nn.ReLU(), nn.Conv2d(65, 2, 1), nn.Flatten(), nn.Linear(32, 3, bias=False)
    model = nn.Sequential(*layers)
    model.to(HERE).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[2].requires_grad_(False)
    round_(model)
    x = torch.randn(2, 3, 4, 4, device=HERE)
    with low(), replearn.fast.synthesized(model, cast=True):
        model[:3](x).sum().backward()
    assert model[2].weight.grad is None
    assert model[4].weight.grad is None  # not zero: an optimizer would decay what took no part in the step
    found = model[0].weight.grad.clone()
    model.zero_grad()
    with low():
        model[:3](x).sum().backward()
    torch.testing.assert_close(found, model[0].weight.grad)


@runs_kernels
def test_every_operator_computes_the_same_beside_casts() -> None:
    """WholeBlock has no mixtures: it reads its neighbours' weights as it computes, not what stands in for them."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    for options in (operators.WholeBlock(), operators.Projection(), operators.AttentionMLP()):
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(HERE)
        replearn.replace_(model, replearn.plan(model, 2, operator=options))
        round_(model)
        x = torch.randn(1, 3, 16, device=HERE)
        expected, gradients = run(model, x, cast=False)
        gradients = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
        made, found = run(model, x, cast=True)
        assert torch.equal(made, expected), options
        torch.testing.assert_close(found, gradients)


@runs_kernels
def test_blocks_that_are_replaced_between_steps_are_let_go() -> None:
    model, x = resnet(replaced=False)
    run(model, x, cast=True)
    gone = weakref.ref(model.layer1[1].conv1.weight)
    replearn.replace_(model, replearn.plan(model, 2))
    expected, _ = run(model, x, cast=False)
    made, _ = run(model, x, cast=True)
    assert torch.equal(made, expected)
    model.zero_grad()
    gc.collect()
    assert gone() is None


@runs_kernels
def test_weights_that_moved_to_the_same_memory_in_another_order_are_noticed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(HERE)
    x = torch.randn(1, 3, 4, 4, device=HERE)
    run(model, x, cast=True)
    first = synthesizing._prepared[model][True, True]
    weight = model[0].weight
    weight.data = weight.data.as_strided(weight.shape, (27, 1, 9, 3))
    assert not first.holds()
    weight.requires_grad_(False)
    with low(), replearn.fast.synthesized(model, cast=True):
        assert model[0].weight is weight  # frozen: left to autocast
        model(x)


@runs_kernels
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_may_be_recomputed_in_the_backward_pass(reentrant: bool) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(HERE)
    inner[0].weight.requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), inner).to(HERE)
    round_(model)
    x = torch.randn(2, 4, device=HERE)
    found = []
    for cast in (True, False):
        model.zero_grad()
        with low(), replearn.fast.synthesized(model, cast=True) if cast else low():
            made = checkpoint(inner, model[0](x), use_reentrant=reentrant)
        made.float().sum().backward()
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(*found)


@runs_kernels
def test_what_a_user_gives_a_layer_inside_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to(HERE)
    with low(), replearn.fast.synthesized(model, cast=True), replearn.fast.synthesized(model, cast=True):
        model[0].weight = new = nn.Parameter(torch.ones(4, 4, device=HERE))
    assert model[0].weight is new
    assert isinstance(model[0].bias, nn.Parameter)


@runs_kernels
def test_two_losses_may_go_back_one_after_another() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(HERE)
    with low(), replearn.fast.synthesized(model, cast=True):
        for _ in range(2):
            model(torch.randn(2, 4, device=HERE)).float().sum().backward()
    assert model[0].weight.grad is not None


def test_only_plain_layers_are_cast() -> None:
    double, turned = nn.Linear(4, 4).double(), nn.Linear(4, 4)
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = weight_norm(nn.Linear(4, 4))
    spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
    others = [nn.LayerNorm(4), nn.Embedding(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2)]
    model = nn.Sequential(normed, spectral, double, turned, *others, nn.Conv1d(4, 4, 1)).to(HERE)
    turned.weight = nn.Parameter(torch.randn(4, 8, device=HERE)[:, ::2])
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(place.parameter)] for place in casting.cast_places(model)}
    # on a CPU autocast is left alone, which has no Python to wait for
    kernels = HERE == "cuda" or INTERPRETED
    assert found == ({"0.bias", "3.bias", "8.weight", "8.bias"} if kernels else set())


def test_nothing_is_cast_without_autocast_or_where_kernels_do_not_run() -> None:
    model, x = resnet()
    expected = model(x)
    with replearn.fast.synthesized(model, cast=True):
        assert model.fc.weight.dtype is torch.float32
        torch.testing.assert_close(model(x), expected)


def test_a_model_without_operators_may_get_some_later() -> None:
    model, x = resnet(replaced=False)
    model.eval()
    with replearn.fast.synthesized(model, cast=True):
        model(x)
    with pytest.raises(replearn.ReplearnError, match="no operators"), replearn.fast.synthesized(model):
        pass
    replearn.replace_(model, replearn.plan(model, 2))
    with replearn.fast.synthesized(model):
        assert handed_out(synthesizing.readers_in(model)[0], torch.float32)


@runs_kernels
def test_operators_find_weights_that_they_are_given_beside_casts() -> None:
    model, x = resnet()
    model.eval()
    reader = synthesizing.readers_in(model)[0]
    given = {id(reader): {name: torch.zeros_like(w).bfloat16() for name, w in reader.made().items()}}
    with low(), HandOut(given):
        expected = model(x)
        with synthesizing.cast_together(model):
            assert model.fc.weight.dtype is torch.bfloat16
            assert torch.equal(model(x), expected)
    with low():
        assert not torch.equal(model(x), expected)


def test_the_casts_run_in_tritons_interpreter() -> None:
    interpret(__file__, "not interpreter and not cuda")


@pytest.mark.cuda
@pytest.mark.skipif(HERE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("label", ["E2E", "RepL"])
def test_fifty_steps_on_cuda_are_fifty_steps_under_autocast_alone(label: str) -> None:
    case = Case(model="cifar_resnet:20:16", batch_size=64, interval=2)
    side = next(side for side in candidates(case) if side.label == label)
    with precision_of("bf16"):
        both = [
            losses(TrainingStep(case, side, "bf16", torch.device("cuda"), cast=cast), 50) for cast in (True, False)
        ]
    torch.testing.assert_close(both[0][:5], both[1][:5], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*both, rtol=0.02, atol=0.05)


@pytest.mark.cuda
@pytest.mark.skipif(HERE == "cpu", reason="needs a GPU")
def test_a_step_on_cuda_casts_all_its_weights_in_one_launch() -> None:
    from torch.profiler import ProfilerActivity, profile

    model, x = resnet()
    run(model, x, cast=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run(model, x, cast=True)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in found.key_averages()}
    assert counts["forward_kernel"] == counts["backward_kernel"] == 1
    assert counts.get("ToCopyBackward0", 0) <= 2  # of the input and of the output
