"""BatchNorm behind a widening 1x1 convolution: with statistics from the narrow input, the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from alike import learned_alike
from interpreting import HERE, runs_kernels
from torch import Tensor, nn
from torch.nn.functional import conv2d

import replearn
from replearn import operators
from replearn.experiments.training.architectures import architecture
from replearn.fast.graphs import capture as capturing
from replearn.fast.kernels import conv1x1_bn as expansion
from replearn.fast.kernels.conv1x1_bn import expand_and_normalize, fits
from replearn.fast.synthesis import launch_cost as paying
from replearn.operators._base.layers import Convolution

NORMS = {
    "plain": lambda: nn.BatchNorm2d(12),
    "average of all": lambda: nn.BatchNorm2d(12, momentum=None),
    "no scale": lambda: nn.BatchNorm2d(12, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(12, track_running_stats=False),
}


def one_after_the_other(z: Tensor, kernel: Tensor, norm: nn.Module) -> Tensor:
    made: Tensor = norm(conv2d(z, kernel))
    return made


def gradients(compute: Any, z: Tensor, kernel: Tensor, norm: Any, weigh: Tensor) -> list[Tensor]:
    z, kernel = z.clone().requires_grad_(), kernel.clone().requires_grad_()
    out = compute(z, kernel, norm)
    inputs = [z, kernel, *norm.parameters()]
    return [out.detach(), *torch.autograd.grad((out * weigh).sum(), inputs)]


@pytest.mark.parametrize("name", NORMS)
def test_outputs_gradients_and_running_statistics_are_those_of_convolution_and_norm(name: str) -> None:
    torch.manual_seed(0)
    first = NORMS[name]().double()
    for parameter in first.parameters():
        nn.init.normal_(parameter)
    second = copy.deepcopy(first)
    for _ in range(3):
        z, kernel = torch.randn(4, 5, 3, 2).double().relu(), torch.randn(12, 5, 1, 1).double()
        weigh = torch.randn(4, 12, 3, 2).double()
        expected = gradients(one_after_the_other, z, kernel, first, weigh)
        found = gradients(expand_and_normalize, z, kernel, second, weigh)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dict(second.named_buffers()), dict(first.named_buffers()), rtol=1e-12, atol=1e-12)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    norm = NORMS["plain"]().double()
    z, kernel = (
        torch.randn(3, 5, 2, 2).double().requires_grad_(),
        torch.randn(12, 5, 1, 1).double().requires_grad_(),
    )
    assert torch.autograd.gradcheck(lambda a, b: expand_and_normalize(a, b, norm), (z, kernel))


def test_under_autocast_the_products_are_in_half_precision_and_the_statistics_are_not() -> None:
    torch.manual_seed(0)
    first, second = nn.BatchNorm2d(64), nn.BatchNorm2d(64)
    z, kernel = (torch.randn(8, 16, 7, 7) + 1).relu(), torch.randn(64, 16, 1, 1)
    expected = first(conv2d(z, kernel))
    with torch.autocast("cpu", torch.bfloat16):
        found = expand_and_normalize(z.bfloat16(), kernel, second)
    assert found.dtype is torch.bfloat16
    assert float((found.float() - expected).detach().norm() / expected.detach().norm()) < 1e-2
    torch.testing.assert_close(second.running_var, first.running_var, rtol=5e-3, atol=0)


def test_a_frozen_kernel_gets_no_gradient_and_a_constant_input_neither() -> None:
    norm = nn.BatchNorm2d(12)
    z, kernel = torch.randn(4, 5, 3, 3), torch.randn(12, 5, 1, 1)
    expand_and_normalize(z, kernel, norm).sum().backward()
    assert norm.weight.grad is not None
    assert norm.bias.grad is not None
    z.requires_grad_()
    expand_and_normalize(z, kernel, norm).square().sum().backward()
    assert z.grad is not None


@pytest.mark.parametrize(
    "operator",
    [
        operators.ReducedBottleneck(),
        operators.Bottleneck(),
        operators.ReducedBottleneck(recompute=True),
        operators.ReducedBottleneck(correction="full"),
    ],
)
def test_operators_that_expand_at_once_train_as_those_that_do_not(
    operator: operators.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = architecture("cifar_bottleneck:29:8", num_classes=10, size=8).double()
    replearn.replace_(model, replearn.plan(model, interval=3, first=2, operator=operator))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 8, 8).double()
    model(x).square().sum().backward()
    used = []
    plain = fits

    def anywhere(*given: Any) -> bool:
        used.append(not plain(*given))
        return True

    monkeypatch.setattr(expansion, "fits", anywhere)
    twin(x).square().sum().backward()
    assert used
    assert all(used)  # and on a CPU it is not taken by itself
    learned_alike(model, twin, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(model.named_buffers()))


def test_a_small_expansion_pays_only_where_launches_are_free() -> None:
    assert not paying.pays(64)
    assert paying.pays(paying.LEAST)
    with paying.free_launches():
        assert paying.pays(64)
    assert not paying.pays(64)


def test_the_warm_up_of_a_recording_runs_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not paying.pays(64)
    monkeypatch.setattr(capturing._thread, "capturing", True)  # as it is on the side stream
    assert paying.pays(64)


@runs_kernels
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("columns", [5, 16, 40])
def test_the_kernels_compute_what_the_plain_steps_do(affine: bool, columns: int) -> None:
    from replearn.fast.kernels._triton import conv1x1_bn_expand as expanding

    torch.manual_seed(0)
    weight, spread = torch.randn(12, columns, device=HERE), torch.randn(12, columns, device=HERE)
    spread = weight @ (spread.mT @ spread)  # a covariance has no negative variances
    centre, outer, d_beta = torch.randn(columns), torch.randn(12, columns), torch.randn(12)
    centre, outer, d_beta = centre.to(HERE), outer.to(HERE), d_beta.to(HERE)
    gamma, beta = (torch.randn(12).to(HERE), torch.randn(12).to(HERE)) if affine else (None, None)
    given = (weight, spread, centre, gamma, beta, 1e-5, torch.bfloat16)
    expected, found = expansion.fold_norm_reference(*given), expanding.fold_norm(*given)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)
    slopes = (weight, outer, d_beta, expected[2], 7, centre, spread, torch.float32)
    torch.testing.assert_close(
        expanding.norm_grads(*slopes), expansion.norm_grads_reference(*slopes), rtol=1e-4, atol=1e-5
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_taken_in_train_mode_alone_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 64, 1, bias=False).cuda().to(memory_format=torch.channels_last)
    norm, twin = nn.BatchNorm2d(64).cuda(), nn.BatchNorm2d(64).cuda()
    z = torch.randn(8, 16, 9, 9, device="cuda").relu().to(memory_format=torch.channels_last)
    layer, x = Convolution(conv, torch.device("cuda")), torch.zeros(8, 64, 9, 9, device="cuda")

    def taken(z: torch.Tensor) -> bool:
        return fits(z, layer, conv.weight, norm, torch.relu, x)

    assert not taken(z)  # too small to pay, but where launches are free
    monkeypatch.setattr(paying, "LEAST", 8 * 64 * 81)
    assert taken(z)
    assert not taken(z.contiguous())
    norm.eval()
    assert not taken(z)
    norm.train()
    for dtype, most in ((torch.float32, 2e-3), (torch.bfloat16, 2e-2)):
        low = z.to(dtype).requires_grad_()
        kernel = conv.weight.detach().to(dtype)
        weigh = torch.randn(8, 64, 9, 9, device="cuda").to(dtype)
        (expected,) = torch.autograd.grad((twin(conv2d(low, kernel)) * weigh).sum(), low)
        (found,) = torch.autograd.grad((expand_and_normalize(low, kernel, norm) * weigh).sum(), low)
        assert float((found - expected).float().norm() / expected.float().norm()) < most
    torch.testing.assert_close(norm.running_var, twin.running_var, rtol=1e-2, atol=1e-3)
