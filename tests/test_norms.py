"""LayerNorm that rounds its result, against torch's: in Triton's interpreter here, for real on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreting import HERE, INTERPRETED, interpret, runs_kernels
from test_narrow_convolutions import bfloat16_in_the_interpreter, distance
from test_patches import calls, small_vit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import replearn
from replearn.experiments.bench.inference_counts import count
from replearn.fast.inlining import flatten, note_values_
from replearn.fast.kernels import layernorm_half as operation
from replearn.fast.kernels.layernorm_half import rounded_norm
from replearn.fast.passes import layernorm_half as rounding
from replearn.fast.passes.layernorm_half import round_norms_

__all__ = ["bfloat16_in_the_interpreter"]  # a fixture, for every test of this file too


def norm(*shape: int, weight: bool = True, bias: bool = True) -> tuple[Any, ...]:
    x = 3 * torch.randn(shape, device=HERE) + 2
    scale = torch.randn(shape[-1], device=HERE) if weight else None
    return x, shape[-1:], scale, torch.randn(shape[-1], device=HERE) if bias else None


def exactly(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    wide = [None if tensor is None else tensor.double() for tensor in (weight, bias)]
    return torch.layer_norm(x.double(), shape, *wide, epsilon)


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 8), (2, 5, 384), (7, 100), (3, 1024), (1, 3, 5000), (33, 64)])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
def test_values_are_those_of_an_exact_norm(shape: tuple[int, ...], weight: bool, bias: bool) -> None:
    given = norm(*shape, weight=weight, bias=bias)
    with torch.autocast(HERE, torch.float16):
        assert operation.fits(*given)
        for epsilon in (1e-6, 0.1):  # one kernel for both
            found = rounded_norm(*given, epsilon)
            assert found.dtype is torch.float16
            assert distance(found, exactly(*given, epsilon)) < 4e-4
            usual = torch.layer_norm(*given, epsilon).half()
            assert (found.float() - usual.float()).abs().max() <= 2**-10 * usual.abs().max()


@runs_kernels
@torch.no_grad()
def test_a_row_far_from_zero_keeps_its_digits() -> None:
    x, shape, weight, bias = norm(4, 256)
    with torch.autocast(HERE, torch.float16):
        found = rounded_norm(x + 1000, shape, weight, bias, 1e-6)
    assert distance(found, exactly(x + 1000, shape, weight, bias, 1e-6)) < 1e-3


@runs_kernels
@torch.no_grad()
def test_bfloat16() -> None:
    given = norm(5, 64)
    with torch.autocast(HERE, torch.bfloat16):
        found = rounded_norm(*given, 1e-6)
    assert found.dtype is torch.bfloat16
    assert distance(found, exactly(*given, 1e-6)) < (8e-3 if INTERPRETED else 4e-3)


@runs_kernels
@pytest.mark.parametrize("change", ["no autocast", "half", "gradient", "two dimensions", "strided", "empty"])
def test_the_kernel_is_not_given_what_it_would_misread(change: str) -> None:
    x, shape, weight, bias = norm(4, 8, 64)
    given = {
        "no autocast": lambda: (x, shape, weight, bias),
        "half": lambda: (x.half(), shape, weight, bias),
        "gradient": lambda: (x.requires_grad_(), shape, weight, bias),
        "two dimensions": lambda: (x, (8, 64), None, None),
        "strided": lambda: (x[:, 0], shape, weight, bias),
        "empty": lambda: (x[:0], shape, weight, bias),
    }[change]()
    with torch.autocast(HERE, torch.float16, enabled=change != "no autocast"):
        assert not operation.fits(*given)
        assert rounded_norm(*given, 1e-6).shape == given[0].shape


@runs_kernels
def test_norms_before_linear_layers_round(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_vit(), torch.randn(2, 3, 16, 16, device=HERE)
    assert (
        calls(replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16), rounded_norm)
        == 0
    )  # too few
    monkeypatch.setattr(rounding, "FEW", 0)
    form: Any = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16)
    assert calls(form, rounded_norm) == 2 * 4 + 1
    with torch.no_grad():
        exact = model(x)
        assert distance(form(x).float(), exact) < 5e-3
    form(x).float().sum().backward()
    assert calls(replearn.fast.streamline(model, x, flatten=True), rounded_norm) == 0
    plain = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16, compile=True)
    assert calls(plain, rounded_norm) == 0
    # norm, qkv, attention, layer with sum; norm, layer, gelu, layer with sum; tokens; the sum of what is picked,
    # norm, head
    assert count(form, x).launches <= 4 * (4 + 4) + 4


@runs_kernels
@pytest.mark.parametrize("how", ["seen", "residual", "dtype"])
def test_a_norm_that_others_read_stays(how: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            if how == "dtype":
                return self.layer(y).to(y.dtype)
            return self.layer(y) + y if how == "residual" else self.layer(y) * y.mean()

    model, x = Block().to(HERE).eval(), torch.randn(2, 5, 64, device=HERE)
    flat = flatten(model, x)
    note_values_(flat, x, torch.float16)
    round_norms_(flat, few=True)
    assert calls(flat, rounded_norm) == 0


@pytest.mark.parametrize(("few", "rounded"), [(False, 0), (True, 1)])
def test_few_numbers_are_rounded_where_launching_costs_nothing(few: bool, rounded: int) -> None:
    model, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval(), torch.randn(2, 5, 64)
    flat = flatten(model, x)
    note_values_(flat, x, torch.float16)
    round_norms_(flat, few=few)
    assert calls(flat, rounded_norm) == rounded


def test_shapes_are_known_without_running_it() -> None:
    with FakeTensorMode():
        x, _, weight, bias = norm(2, 5, 64)
        made = torch.ops.replearn.rounded_norm(x, weight, bias, 1e-6, torch.float16)
    assert (made.shape, made.dtype) == (x.shape, torch.float16)


def test_without_autocast_nothing_is_rounded() -> None:
    given = norm(2, 64)
    assert torch.equal(rounded_norm(*given, 1e-6), torch.layer_norm(*given, 1e-6))


def test_in_the_interpreter() -> None:
    interpret(__file__, "exact_norm or digits or bfloat16 or misread or before_linear or others_read")
