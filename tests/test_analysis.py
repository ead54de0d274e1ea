"""The analysis: every number against a direct computation of it, and bounds that hold."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tiny import settled_resnet
from torch import nn
from torch.nn.functional import cross_entropy

import replearn
from replearn import ReplearnError, operators
from replearn.analysis import Analysis, analyze, converge
from replearn.analysis.recoverability import distances
from replearn.analysis.suffix import largest_singular


def batches(count: int = 6, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


SETTINGS = {
    "forward": lambda model, batch: model(batch[0]),
    "loss": lambda output, batch: cross_entropy(output, batch[1]),
    "iterations": 25,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return settled_resnet(8)


@pytest.fixture(scope="module")
def plan(model: nn.Module) -> replearn.Plan:
    return replearn.plan(model, 2, operator=operators.Basic(correction="low-rank", rank=3))


@pytest.fixture(scope="module")
def found(model: nn.Module, plan: replearn.Plan) -> Analysis:
    return analyze(model, plan, batches(), **SETTINGS)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def replaced(model: nn.Module, plan: replearn.Plan) -> nn.Module:
    made = copy.deepcopy(model)
    torch.manual_seed(0)
    replearn.calibrate_(made, plan, batches(), correction="none", forward=SETTINGS["forward"])  # type: ignore[arg-type]
    return made


def inputs_and_outputs(model: nn.Module, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, a, y: seen.extend((a[0].clone(), y)))
    model(x)
    handle.remove()
    return seen[0], seen[1]


@torch.no_grad()
def test_local_errors_are_those_of_the_definition(
    model: nn.Module, plan: replearn.Plan, found: Analysis, replaced: nn.Module
) -> None:
    held = batches()[1][0]  # the second of six batches is the held-out one
    for target, made in zip(plan.targets, found.targets, strict=True):
        h, f = inputs_and_outputs(model, target.name, held)
        g = replaced.get_submodule(target.name)(h)
        wrong, size = (g - f).flatten(1).norm(dim=1), h.flatten(1).norm(dim=1)
        assert made.alone.epsilon == pytest.approx(float((wrong / size.clamp_min(1)).max()), rel=1e-4)
        assert made.alone.absolute == pytest.approx(float(wrong.max()), rel=1e-4)
        assert made.alone.height == pytest.approx(float(size.max()), rel=1e-4)
        share = float((g - f).square().sum() / (h - f).square().sum())
        assert made.alone.relative == pytest.approx(share, rel=1e-4)
        # behind the replacements before it, the block itself put back
        other = copy.deepcopy(replaced)
        other.get_submodule(target.stack)[target.position - 1] = model.get_submodule(target.name)  # type: ignore[operator]
        h, f = inputs_and_outputs(other, target.name, held)
        wrong = (replaced.get_submodule(target.name)(h) - f).flatten(1).norm(dim=1)
        assert made.together.absolute == pytest.approx(float(wrong.max()), rel=1e-4)


def test_power_iteration_finds_the_largest_singular_values() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    found, change = largest_singular(net, x, iterations=500, seed=0)
    for value, row in zip(found, x, strict=True):
        jacobian = torch.autograd.functional.jacobian(net, row)
        assert float(value) == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=2e-2)
    assert change <= 1e-2


@torch.no_grad()
def test_deviations_are_measured_and_bounds_hold(
    model: nn.Module, plan: replearn.Plan, found: Analysis, replaced: nn.Module
) -> None:
    held = batches()[1][0]
    far = (replaced(held) - model(held)).norm(dim=1)
    assert found.together.measured == pytest.approx(float(far.max()), rel=1e-4)
    assert found.together.relative == pytest.approx(
        float((replaced(held) - model(held)).norm() / model(held).norm()), rel=1e-4
    )
    for made in (found.together, *(target.deviation for target in found.targets)):
        assert 0 < made.measured <= made.sharp <= made.bound * (1 + 1e-6)
        assert made.bound <= made.printed * 1.05
    for target in found.targets:
        assert target.suffix.realised <= 1.05 * target.suffix.factor
        assert target.deviation.bound == pytest.approx(
            target.suffix.factor * target.alone.epsilon * max(target.alone.height, 1)
        )
    one = copy.deepcopy(model)
    one.layer1[1] = replaced.layer1[1]  # type: ignore[index, operator]
    assert found.targets[0].deviation.measured == pytest.approx(
        float((one(held) - model(held)).norm(dim=1).max()), rel=1e-4
    )


def test_gradient_bias_is_the_difference_of_two_gradients(
    model: nn.Module, found: Analysis, replaced: nn.Module
) -> None:
    x, y = batches()[1]
    gone = ("layer1.1.", "layer2.1.", "layer3.1.")
    names = [name for name, _ in model.named_parameters() if not name.startswith(gone)]

    def gradient(net: nn.Module) -> torch.Tensor:
        parameters = [net.get_parameter(name) for name in names]
        return torch.cat([g.flatten() for g in torch.autograd.grad(cross_entropy(net(x), y), parameters)])

    true, made = gradient(model), gradient(replaced)
    assert found.gradient is not None
    assert found.gradient.stopped.true == pytest.approx(float(true.norm()), rel=1e-3)
    assert found.gradient.stopped.measured == pytest.approx(float((made - true).norm()), rel=1e-3)
    assert found.gradient.flowing.measured != found.gradient.stopped.measured
    assert found.gradient.stopped.through_output <= 1.05 * found.gradient.measured_bound
    assert found.gradient.measured_bound <= found.gradient.bound


def test_distances_are_projections_onto_the_neighbours_span(model: nn.Module, plan: replearn.Plan) -> None:
    target = plan.targets[0]
    made = {(d.role, d.span): d for d in distances(model, target)}[("conv2", "previous.conv2 + next.conv2")]
    own, *sides = (model.layer1[i].conv2.weight.detach().double() for i in (1, 0, 2))  # type: ignore[index]
    whole = torch.stack([side.flatten() for side in sides], dim=1)
    left = own.flatten() - whole @ torch.linalg.lstsq(whole, own.flatten()[:, None]).solution[:, 0]
    assert made.absolute == pytest.approx(float(left.norm()), rel=1e-5)
    assert made.whole == pytest.approx(float(left.norm() / own.norm()), rel=1e-5)


def test_it_is_written_as_json_prints_and_leaves_the_model_alone(found: Analysis, model: nn.Module) -> None:
    read = json.loads(found.to_json())
    assert read["format"] == "replearn-analysis-1"
    assert read["targets"][0]["alone"]["epsilon"] == found.targets[0].alone.epsilon
    words = ("layer2.1", "epsilon", "all together", "Recoverability", "Gradient bias", "not guarantees")
    assert all(word in str(found) for word in words)
    fresh = settled_resnet(8)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True)
    )
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_plain_sgd_is_measured_against_the_convergence_bounds() -> None:
    """With a learning rate below 1 / L_J, sources that gradients flow to, and noise that is known exactly."""
    torch.manual_seed(0)
    model, data = replearn.models.CifarResNet(20, width=4), batches(2)
    flowing, stopped = (
        converge(
            model,
            replearn.plan(model, 2, operator=operators.Basic(stop_gradient=stop)),
            data,
            loss=SETTINGS["loss"],  # type: ignore[arg-type]
            forward=SETTINGS["forward"],  # type: ignore[arg-type]
            lr=0.002,
            steps=12,
            points=2,
        )
        for stop in (False, True)
    )
    assert [point.step for point in flowing.points] == [0, 6]
    assert flowing.points[-1].loss < flowing.points[0].loss
    mean, start, noise = flowing.bound(2)
    assert 0 < mean <= start + noise
    assert start == pytest.approx(2 * flowing.points[0].loss / (0.002 * 12))
    assert all(point.stop_gradient_bias < 1e-4 for point in flowing.points)
    assert "steps follow grad J on average" in flowing.verdicts()
    assert all(point.stop_gradient_bias > 1e-3 for point in stopped.points)
    assert "by stop-gradient" in " ".join(stopped.verdicts())
    for point in stopped.points:  # the triangle inequality that the second statement rests on
        assert point.full_squared <= 2 * point.shared_squared + 2 * point.bias_squared * (1 + 1e-9)
    with pytest.raises(ReplearnError, match="at least two batches"):
        converge(model, replearn.plan(model, 2), data[:1], loss=SETTINGS["loss"])  # type: ignore[arg-type]


def test_a_causal_language_model_is_analysed_on_its_own_predictions() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 5, "vocab_size": 40}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    plan = replearn.plan(model, 2, operator=operators.Projection(correction="full"))
    texts = [{"input_ids": torch.randint(40, (6, 9))} for _ in range(3)]
    made = analyze(model, plan, texts, iterations=15)
    assert made.gradient is not None
    assert "own predictions" in made.gradient.labels
    assert made.together.measured <= made.together.sharp
    (proj,) = (d for d in made.targets[0].distances if d.role == "proj")
    assert len(proj.heads) == 3
    assert 0.9 < proj.whole <= 1


def test_vision_transformers_and_whole_blocks_are_analysed() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    size = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 7}
    model = timm.create_model("vit_tiny_patch16_224", **size).eval()
    plan = replearn.plan(model, 2, operator=operators.WholeBlock())
    made = analyze(model, plan, [x for x, _ in batches(3, 4)], iterations=15)
    assert made.targets[0].alone.relative <= 1  # it keeps its start, or does nothing


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (batches(1), "at least two batches, and got 1"),
        ([(torch.full((4, 3, 8, 8), float("nan")), torch.zeros(4))] * 3, "NaN or infinity on held-out batch 0"),
        ([(torch.randn(4, 5, 8, 8), torch.zeros(4))] * 3, r"could not be run on calibration batch 0.*forward="),
    ],
)
def test_bad_data_is_refused(model: nn.Module, plan: replearn.Plan, data: object, message: str) -> None:
    with pytest.raises(ReplearnError, match=message):
        analyze(model, plan, data, **SETTINGS)  # type: ignore[arg-type]


def test_plans_and_models_that_do_not_fit_are_refused(
    model: nn.Module, plan: replearn.Plan, replaced: nn.Module
) -> None:
    other = replearn.models.CifarResNet(32, width=4).eval()
    with pytest.raises(ReplearnError, match="The plan does not fit"):
        analyze(other, plan, batches())
    with pytest.raises(ReplearnError, match=r"takes a Plan, got int"):
        analyze(model, 4, batches())  # type: ignore[arg-type]
    with pytest.raises(ReplearnError, match="replaced"):
        analyze(replaced, plan, batches())
    with pytest.raises(ReplearnError, match=r"returns list.*give forward="):
        analyze(model, plan, [b[0] for b in batches()], forward=lambda m, x: [m(x).tolist()])
