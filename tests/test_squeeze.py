"""A reduced bottleneck as one operation: the same numbers as its layers one after another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from alike import learned_alike
from interpreting import HERE, runs_kernels
from narrow import resnet_narrow_bottleneck
from torch import Tensor, nn
from torch.nn.functional import conv2d

import replearn
from replearn import operators
from replearn.costs.precision import float32_products
from replearn.fast.graphs import capture as capturing
from replearn.fast.kernels import reduced_bottleneck as squeeze
from replearn.fast.kernels.reduced_bottleneck import add_relu_, fits, relu_grad_and_sum, run_fused
from replearn.operators.functional import load_faster
from replearn.surgery.replace import operators_of

LAST = torch.channels_last
NORMS = {
    "plain": lambda: nn.BatchNorm2d(32),
    "no scale": lambda: nn.BatchNorm2d(32, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(32, track_running_stats=False),
}


def one_after_the_other(x: Tensor, reduce: Tensor, expand: Tensor, norm: nn.Module) -> Tensor:
    return (x + norm(conv2d(conv2d(x, reduce).relu(), expand))).relu()


def gradients(compute: Any, given: list[Tensor], norm: Any, weigh: Tensor) -> list[Tensor]:
    given = [tensor.clone().requires_grad_() for tensor in given]
    out = compute(*given, norm)
    return [out.detach(), *torch.autograd.grad((out * weigh).sum(), [*given, *norm.parameters()])]


def drawn(dtype: torch.dtype) -> list[Tensor]:
    shapes = (4, 32, 3, 2), (8, 32, 1, 1), (32, 8, 1, 1)
    return [torch.randn(shape, device=HERE).to(dtype).contiguous(memory_format=LAST) for shape in shapes]


@pytest.mark.parametrize("name", NORMS)
def test_outputs_gradients_and_running_statistics_are_those_of_the_layers(name: str) -> None:
    torch.manual_seed(0)
    first = NORMS[name]().to(HERE, torch.float64)
    for parameter in first.parameters():
        nn.init.normal_(parameter)
    second = copy.deepcopy(first)
    for _ in range(3):
        given, weigh = drawn(torch.float64), torch.randn(4, 32, 3, 2, device=HERE, dtype=torch.float64)
        expected = gradients(one_after_the_other, given, first, weigh)
        found = gradients(run_fused, given, second, weigh)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-8)
    buffers = dict(second.named_buffers()), dict(first.named_buffers())
    torch.testing.assert_close(*buffers, rtol=1e-9, atol=1e-9)


def test_pixels_that_are_all_alike_have_no_variance_and_no_nan() -> None:
    torch.manual_seed(0)
    norm, given = nn.BatchNorm2d(64), (torch.randn(16, 64, 1, 1) * 0.18, torch.randn(64, 16, 1, 1) * 0.35)
    x = (10 * torch.rand(1, 64, 1, 1)).expand(8, 64, 7, 7).contiguous(memory_format=LAST)
    assert bool(run_fused(x, *given, norm).isfinite().all())
    assert bool(norm.running_var is not None and norm.running_var.isfinite().all())


@pytest.mark.parametrize("listener", ["conv1", "conv3", "norm", "activation"])
def test_layers_with_hooks_are_called_one_after_another(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resnet_narrow_bottleneck(num_classes=10)
    replearn.replace_(model, replearn.plan(model, interval=3, first=2, operator=operators.ReducedBottleneck()))
    _, layer = next(operators_of(model))
    x = torch.empty(4, layer.conv1.shell.in_channels, 8, 8).to(memory_format=LAST)
    given = ((layer.conv1, x), (layer.conv3, x), layer.norm, layer.activation)
    monkeypatch.setattr(squeeze, "on_gpu", lambda device: True)
    assert not fits(x, *given)  # too small to pay, but where launches are free
    monkeypatch.setattr(squeeze, "is_capturing_here", lambda: True)
    assert fits(x, *given)
    layer.norm.momentum = None
    assert not fits(x, *given)
    layer.norm.momentum = 0.1
    getattr(layer, listener).register_forward_hook(lambda *call: None)
    assert not fits(x, *given)


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize(("rows", "inner"), [(1, 64), (130, 192)])
def test_the_end_of_the_bottleneck_propagates_nan(rows: int, inner: int) -> None:
    torch.manual_seed(0)
    shapes = (rows, 256), (rows, inner), (256, inner), (256,)
    x, z, scaled, shift = (torch.randn(shape, device=HERE).half() / 4 for shape in shapes)
    x[0, 3] = float("nan")
    add_relu_(found := torch.empty_like(x), x, z, scaled, shift)
    expected = (x.float() + z.float() @ scaled.float().mT + shift.float()).relu()
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2, equal_nan=True)


@runs_kernels
def test_a_relu_lets_through_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    y, grad = torch.randn(300, 48, device=HERE).relu(), torch.randn(300, 48, device=HERE)
    y[5, 7] = float("nan")
    norm, other = nn.BatchNorm2d(48), torch.randn(300, 48, device=HERE)
    monkeypatch.setattr(squeeze, "launches", lambda tensor: False)
    expected, of_both = relu_grad_and_sum(grad, y, norm), relu_grad_and_sum(grad, y, norm, other)
    monkeypatch.setattr(squeeze, "launches", lambda tensor: True)
    for _ in range(2):  # who counts arrivals starts anew
        torch.testing.assert_close(relu_grad_and_sum(grad, y, norm), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(relu_grad_and_sum(grad, y, norm, other), of_both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("correction", "recorded"), [("none", False), ("none", True), ("full", False)])
def test_operators_that_squeeze_train_as_those_that_do_not(
    correction: Any, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(capturing._thread, "capturing", recorded)
    operator = operators.ReducedBottleneck(correction=correction)
    model = resnet_narrow_bottleneck(num_classes=10).double()
    replearn.replace_(model, replearn.plan(model, interval=3, first=2, operator=operator))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 32, 32).double()
    model(x).square().sum().backward()
    used = []

    def anywhere(*given: Any) -> bool:
        used.append(not fits(*given))
        return True

    monkeypatch.setattr(squeeze, "fits", anywhere)
    load_faster()
    twin(x).square().sum().backward()
    assert used
    assert all(used)  # and on a CPU it is not taken by itself
    learned_alike(model, twin, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(model.named_buffers()))


@pytest.mark.parametrize("frozen", range(3))
def test_what_is_frozen_gets_no_gradient_and_the_rest_does(frozen: int) -> None:
    torch.manual_seed(0)
    norm, given = nn.BatchNorm2d(32).to(HERE), drawn(torch.float32)
    learning = [tensor.requires_grad_(number != frozen) for number, tensor in enumerate(given)]
    expected = [tensor.detach().clone().requires_grad_() for tensor in given]
    with float32_products(tf32=False):
        run_fused(*learning, norm).square().sum().backward()
        one_after_the_other(*expected, nn.BatchNorm2d(32).to(HERE)).square().sum().backward()
    for number, (tensor, other) in enumerate(zip(learning, expected, strict=True)):
        assert (tensor.grad is None) == (number == frozen)
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-3, atol=1e-3)
