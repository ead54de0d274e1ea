"""The sixth law in low precision: synthesis in float32 or better, cast once; and in channels_last."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from stacks import OPEN, every_operator, stack
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO

import replearn
from replearn import operators
from replearn.blocks.running import call
from replearn.operators._base.operator import Operator
from replearn.operators._base.options import MixingOptions, Options

LOW = (torch.bfloat16, torch.float16)


EVERY = list(every_operator(full={"correction": "full"}, low_rank=OPEN))
CONVOLUTIONS = [param for param in EVERY if param.values[0] in ("basic", "bottleneck")]


def subject(kind: str, options: Options) -> tuple[nn.Sequential, Tensor]:
    model, x = stack(kind, options, noise=0.3)
    return model.eval(), x


def coefficients(model: nn.Module) -> dict[str, nn.Parameter]:
    """a and b, or scale and shift, of every operator, by their names in the state dict."""
    kept = {id(p) for m in model.modules() if isinstance(m, Operator) for p in m.coefficients()}
    return {name: p for name, p in model.named_parameters() if id(p) in kept}


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Products(TorchDispatchMode):
    """Records the operands of matrix products and convolutions, as the kernels get them."""

    NAMES = ("mm", "addmm", "bmm", "convolution", "linear", "matmul")

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.NAMES:
            self.operands += [arg for arg in args if isinstance(arg, Tensor)]
        return func(*args, **(kwargs or {}))

    def includes(self, weight: Tensor) -> bool:
        """Was this very weight, or its transpose, an operand? Same values, same dtype."""
        found = [o for o in self.operands if o.dtype is weight.dtype]
        return any(torch.equal(o, weight) or (o.dim() == 2 and torch.equal(o.t(), weight)) for o in found)


def synthesized(operator: Any) -> dict[str, Tensor]:
    """The matrices and kernels that an operator computes with, as it synthesizes them."""
    if hasattr(operator, "parameters_of_block"):
        return {name: tensor for name, tensor in operator.parameters_of_block().items() if tensor.dim() > 1}
    if hasattr(operator, "attention"):
        return synthesized(operator.attention) | synthesized(operator.mlp)
    if not hasattr(operator, "synthesized_in_full"):
        return {}
    return {name: tensor for name, tensor in operator.synthesized_in_full().items() if tensor.dim() > 1}


@pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)
@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_a_cast_model_runs_in_its_dtype_and_deploys_in_it(kind: str, options: Options, dtype: torch.dtype) -> None:
    model, x = subject(kind, options)
    model, x = model.to(dtype), x.to(dtype)
    assert model[1](x).dtype is model[0](x).dtype is dtype
    plain = replearn.deploy(model, example=x)  # compares the two
    assert {p.dtype for p in plain.parameters()} == {dtype}
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    assert {p.dtype for p in coefficients(model).values()} <= {expected}


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to("cpu", torch.bfloat16)])
@pytest.mark.parametrize("options", [operators.Basic(), operators.NoWeights()], ids=lambda options: options.name)
def test_coefficients_and_gradients_survive_a_detour_through_low_precision(options: Options, cast: Any) -> None:
    model, x = subject("basic", options)
    model(x).sum().backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in coefficients(model).items()}
    assert len(before) == 2
    cast(model)
    assert next(model[0].parameters()).dtype in LOW
    for name, parameter in coefficients(model).items():
        assert torch.equal(parameter, before[name][0])
        assert torch.equal(parameter.grad, before[name][1])
    model.float()
    for name, parameter in coefficients(model).items():
        assert torch.equal(parameter, before[name][0])


@pytest.mark.parametrize(("kind", "options"), EVERY)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_dtype_of_a_block(kind: str, options: Options, given: torch.dtype) -> None:
    model, x = subject(kind, options)
    with autocast():
        x = model[0](x.to(given))  # what a block gets is what the one before it gave
        assert model[1](x).dtype is model[2](x).dtype


@pytest.mark.parametrize(("kind", "options"), EVERY)
@pytest.mark.parametrize("way", ["autocast", "cast model"])
def test_synthesis_is_in_float32_and_cast_after(kind: str, options: Options, way: str) -> None:
    model, x = subject(kind, options)
    if way == "cast model":
        model, x = model.bfloat16(), x.bfloat16()
        wide = copy.deepcopy(model).float()  # the same values, and float32 from here on
    else:
        wide = model
    expected = {role: weight.bfloat16() for role, weight in synthesized(wide[1]).items()}
    with autocast() if way == "autocast" else nullcontext(), Products() as products:
        model[1](x)
    assert bool(expected) == bool(options.sides)
    for role, weight in expected.items():
        assert products.includes(weight), f"{role} is not the float32 synthesis, rounded once"


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_a_float64_model_is_synthesized_in_float64(kind: str, options: Options) -> None:
    model, x = subject(kind, options)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():  # to values that float32 does not have
            parameter.add_(1e-3 * torch.randn_like(parameter))
    with Products() as products:
        model[1](x.double())
    weights = synthesized(model[1])
    assert bool(weights) == bool(options.sides)
    for role, weight in weights.items():
        assert products.includes(weight), role
        assert weight.dtype is torch.float64
        assert (weight != weight.float().double()).float().mean() > 0.9, f"{role} went through float32"


def test_training_under_autocast_reaches_a_b_and_through_the_sources() -> None:
    model, x = subject("basic", operators.Basic(stop_gradient=False))
    with autocast():
        y = model[1](x)
    y.float().square().mean().backward()
    low = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model[1](x).square().mean().backward()
    assert {"1.a", "1.b", "0.conv2.weight", "2.conv1.weight"} <= low.keys()
    for name, gradient in low.items():
        exact = model.get_parameter(name).grad
        assert gradient.dtype is torch.float32
        assert (gradient - exact).norm() < 0.05 * exact.norm(), name


@pytest.mark.parametrize("name", ["hf_llama", "hf_gpt2", "timm_vit", "torchvision_vit"])
def test_models_of_the_libraries_run_under_autocast_and_cast(name: str) -> None:
    entry = ZOO[name]
    for options in (operators.AttentionMLP(), operators.WholeBlock()):
        model, batch = entry.replaced(options), entry.batch()
        exact = tensor_of(call(model, batch))
        with autocast():
            found = tensor_of(call(model, batch))
        assert (found.float() - exact).norm() < 0.05 * exact.norm()
        batch = batch if isinstance(batch, dict) else batch.bfloat16()
        found = tensor_of(call(model.bfloat16(), batch))
        assert found.dtype is torch.bfloat16
        assert (found.float() - exact).norm() < 0.05 * exact.norm()


def tensor_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS)
def test_channels_last_stays_channels_last_and_equal(kind: str, options: Options) -> None:
    model, x = subject(kind, options)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    found = model(x.contiguous(memory_format=torch.channels_last))
    operator = model[1](x.contiguous(memory_format=torch.channels_last))
    for made in (found, operator):
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert not made.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_shared_coefficients_are_kept_too() -> None:
    options = [o for o in operators.available().values() if issubclass(o, MixingOptions)]
    for option in options:
        model, _ = subject(option.kinds[-1], option(coefficients="shared"))
        assert {p.dtype for p in coefficients(model.half()).values()} == {torch.float32}, option.name
