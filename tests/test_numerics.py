"""Zero rows, inf, NaN, subnormals, overflow, dead coefficients: finite where the formula is, else a clear stop."""

from __future__ import annotations

import pytest
import tiny
import torch
from stacks import stack
from torch import Tensor, nn
from torch.func import functional_call

import replearn
from replearn import ReplearnError, operators
from replearn.operators._base.mixture import Mixture
from replearn.operators._base.options import Options, ReadingOptions


def suited() -> list[tuple[str, type[Options]]]:
    """Every operator of the folder with every kind of block that it suits."""
    kinds = operators.available().values()
    return [(kind, options) for options in kinds for kind in options.kinds]


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)


def all_open(options: type[Options]) -> Options:
    """With gradients to the sources and a full correction, where it has them."""
    return options(stop_gradient=False, correction="full") if issubclass(options, ReadingOptions) else options()


@pytest.mark.parametrize(("kind", "options"), suited(), ids=lambda value: getattr(value, "name", value))
def test_gradients_of_every_operator_are_those_of_its_formula(kind: str, options: type[Options]) -> None:
    model, x = stack(kind, all_open(options), noise=0.05, dtype=torch.float64, transformer=layer)
    model.eval()
    names = [name for name, p in model.named_parameters() if p.requires_grad]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        out: Tensor = functional_call(model, dict(zip(names, values, strict=True)), (x,))
        return out

    given = [model.get_parameter(name).detach().clone().requires_grad_() for name in names]
    assert any(name.startswith("1.") for name in names) or options.name in ("removal", "mlp")
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *given), fast_mode=True)


@pytest.mark.parametrize(("kind", "options"), suited(), ids=lambda value: getattr(value, "name", value))
def test_zero_sources_and_zero_coefficients_stay_finite_both_ways(kind: str, options: type[Options]) -> None:
    model, x = stack(kind, all_open(options), noise=0.05, transformer=layer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.startswith("1."):
                parameter[0] = 0  # an all-zero row in every source
                parameter[1:2] = 1e-41  # and a subnormal one
            elif name in ("1.a", "1.b"):
                parameter.zero_()
    out = model.train()(x)
    out.square().mean().backward()
    assert bool(out.isfinite().all())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), name
    model.eval()
    replearn.deploy(model, example=x)


def test_rows_of_zeros_are_zeros_and_their_gradients_finite() -> None:
    weight = torch.zeros(2, 3, requires_grad=True)
    made = Mixture(previous=weight, a=torch.ones(2), along="rows", normalise=True).plain()
    made.sum().backward()
    assert torch.equal(made, torch.zeros(2, 3))
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())


def test_a_subnormal_row_keeps_its_direction() -> None:
    weight = torch.tensor([[3e-41, 4e-41]])
    made = Mixture(previous=weight, a=torch.tensor([1e6]), along="rows", normalise=True).plain()
    torch.testing.assert_close(made[0, 1] / made[0, 0], torch.tensor(4 / 3), rtol=1e-4, atol=0)


def test_float16_overflow_stops_the_deployment_and_names_the_block() -> None:
    model = tiny.replaced(tiny.resnet()).half().eval()
    with torch.no_grad():
        model.layer1[1].a.fill_(1e6)
    with pytest.raises(
        ReplearnError, match=r"layer1\.1 can't be deployed: its .* is inf or NaN in torch\.float16"
    ):
        replearn.deploy(model)
    replearn.deploy(model.float(), example=torch.randn(2, 3, 8, 8))


def test_float16_sources_at_their_largest_are_mixed_in_float32() -> None:
    weight = torch.full((2, 4), 65504.0, dtype=torch.float16)
    made = Mixture(previous=weight, next=weight, along="rows", normalise=True, a=torch.ones(2), b=torch.ones(2))
    torch.testing.assert_close(made.plain(), torch.ones(2, 4))


def test_a_batch_norm_without_variance_deploys() -> None:
    model = tiny.replaced(tiny.resnet()).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.zero_()
            elif name.endswith("running_mean"):
                buffer.fill_(0.1)
    x = torch.full((2, 3, 8, 8), 0.5)
    if bool(model(x).isfinite().all()):
        replearn.deploy(model.double(), example=x.double())
    else:
        with pytest.raises(ReplearnError, match="of the model itself is inf or NaN"):
            replearn.deploy(model, example=x)


def test_training_on_constant_images_stays_finite() -> None:
    model = tiny.replaced(tiny.resnet()).train()
    out = model(torch.zeros(4, 3, 8, 8))
    out.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_a_model_that_gives_nan_is_told_from_a_wrong_deployment() -> None:
    model = tiny.replaced(tiny.resnet()).eval()
    with pytest.raises(ReplearnError, match="output 0 of the model itself is inf or NaN on this example"):
        replearn.deploy(model, example=torch.full((2, 3, 8, 8), float("nan")))
