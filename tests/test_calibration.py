"""Closed-form fitting: exact where the block is of the operator's form, and never worse than removal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import replearn
from replearn import ReplearnError, operators
from replearn.fitting.observe import observe
from replearn.operators._base.operator import FINE_RIDGES
from replearn.operators._base.ridge import Moments, Solution, fit_rows, fit_scalars, solve
from replearn.surgery.replace import plan_of


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(features: torch.Tensor, targets: torch.Tensor, parts: int = 1) -> Moments:
    made = Moments()
    for f, t in zip(features.chunk(parts), targets.chunk(parts), strict=True):
        made.add(f[None], t[None])
    return made


def fit_full(made: Moments, held: Moments, shape: tuple[int, int], rank: int | None = None) -> Solution:
    base = torch.zeros(1, *shape, dtype=torch.float64)
    return solve(made, held, base, rank=rank, ridges=FINE_RIDGES)


def test_moments_do_not_depend_on_how_the_data_is_cut() -> None:
    f, t = rows(60, 5, 0), rows(60, 3, 1)
    whole, parts = moments_of(f, t), moments_of(f, t, parts=7)
    torch.testing.assert_close(whole.covariances(), parts.covariances())
    torch.testing.assert_close(whole.covariances()[0][0], torch.cov(f.T, correction=0))
    weight, shift = rows(3, 5, 2), rows(1, 3, 3)[0]
    direct = (t - f @ weight.T - shift).square().sum() / 60
    assert whole.error(weight[None], shift[None]) == pytest.approx(float(direct))


def test_a_full_fit_is_least_squares() -> None:
    f, t = rows(200, 6, 0) + 1.0, rows(200, 4, 1)
    made = moments_of(f, t)
    found = fit_full(made, made, (4, 6))
    ones = torch.cat([f, torch.ones(200, 1, dtype=torch.float64)], dim=1)
    expected = torch.linalg.lstsq(ones, t).solution
    torch.testing.assert_close(found.weight[0], expected[:-1].T, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.shift[0], expected[-1], rtol=1e-5, atol=1e-6)


def test_the_ridge_is_the_one_that_does_best_on_held_out_rows() -> None:
    truth = rows(1, 40, 9)
    f, held = rows(45, 40, 0), rows(500, 40, 1)
    noise = 3 * rows(545, 1, 2)
    made, rest = moments_of(f, f @ truth.T + noise[:45]), moments_of(held, held @ truth.T + noise[45:])
    found = fit_full(made, rest, (1, 40))
    assert found.ridge > 1e-3  # 45 noisy rows for 40 unknowns need a real one
    overfitted = fit_full(made, made, (1, 40))
    assert overfitted.ridge == 1e-8
    error = [rest.error(s.weight, s.shift) for s in (found, overfitted)]
    assert error[0] < 0.7 * error[1]


def test_a_low_rank_fit_is_the_best_of_its_rank() -> None:
    f, t = rows(300, 6, 0), rows(300, 5, 1) + rows(300, 6, 0) @ rows(6, 5, 2)
    made = moments_of(f, t)
    found = fit_full(made, made, (5, 6), rank=2)
    assert found.factors is not None
    left, right = found.factors
    assert torch.linalg.matrix_rank(found.weight[0]) == 2
    torch.testing.assert_close(left @ right, found.weight)
    error = made.error(found.weight, found.shift)
    for seed in range(200):  # gradient-free search around it finds nothing better
        nudged = (left + 0.01 * rows(5, 2, seed)) @ (right + 0.01 * rows(2, 6, seed + 999))
        assert made.error(nudged, made.shift(nudged)) >= error - 1e-9


def test_coefficients_are_least_squares_of_their_directions() -> None:
    f, t = rows(100, 6, 0), rows(100, 4, 1)
    made = moments_of(f, t)
    one, other = rows(4, 6, 2), rows(4, 6, 3)
    a, b = fit_rows(made, [one, other])
    for c in range(4):
        design = torch.stack([f @ one[c], f @ other[c], torch.ones(100, dtype=torch.float64)], dim=1)
        expected = torch.linalg.lstsq(design, t[:, c : c + 1]).solution[:2, 0]
        torch.testing.assert_close(torch.stack([a[c], b[c]]), expected, rtol=1e-6, atol=1e-7)
    shifts = [rows(1, 4, 4)[0], rows(1, 4, 5)[0]]
    found = fit_scalars(made, [one, other], shifts)
    design = torch.stack([(f @ d.T + s).flatten() for d, s in zip((one, other), shifts, strict=True)], dim=1)
    expected = torch.linalg.lstsq(design, t.flatten()[:, None]).solution[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def resnet() -> nn.Module:
    return tiny.settled_resnet(12)


def bottlenecks() -> nn.Module:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    block = torchvision.models.resnet.Bottleneck
    stages = (nn.Sequential(*(block(32, 8) for _ in range(length))) for length in (3, 3))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for _ in range(3):
        model(torch.randn(8, 3, 16, 16))
    return model.eval()


def vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 5, "num_heads": 3, "num_classes": 7}
    return timm.create_model("vit_tiny_patch16_224", **size).eval()


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 5, "n_head": 3, "vocab_size": 50, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


def images(size: int, count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, 3, size, size, generator=generator) for _ in range(count)]


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(50, (12, 20), generator=generator)} for _ in range(6)]


FULL = {"correction": "full"}
CASES = [
    (resnet, lambda: images(12), operators.Basic()),
    (resnet, lambda: images(12), operators.Basic(coefficients="shared")),
    (resnet, lambda: images(12), operators.Basic(sources="next")),
    (resnet, lambda: images(12), operators.Basic(correction="low-rank", rank=3)),
    (resnet, lambda: images(12), operators.Basic(**FULL)),
    (resnet, lambda: images(12), operators.Basic(sources="none", **FULL)),
    (resnet, lambda: images(12), operators.NoWeights()),
    (bottlenecks, lambda: images(16), operators.Bottleneck()),
    (bottlenecks, lambda: images(16), operators.Bottleneck(**FULL)),
    (bottlenecks, lambda: images(16), operators.ReducedBottleneck(correction="low-rank", rank=4)),
    (bottlenecks, lambda: images(16), operators.ReducedBottleneck(**FULL)),
    (vit, lambda: images(16), operators.Projection()),
    (vit, lambda: images(16), operators.Projection(coefficients="shared")),
    (vit, lambda: images(16), operators.Projection(correction="low-rank", rank=4)),
    (vit, lambda: images(16), operators.Projection(**FULL)),
    (vit, lambda: images(16), operators.HeadWise(correction="low-rank", rank=4)),
    (vit, lambda: images(16), operators.HeadWise(**FULL)),
    (vit, lambda: images(16), operators.MLP(**FULL)),
    (vit, lambda: images(16), operators.AttentionMLP(**FULL)),
    (vit, lambda: images(16), operators.AttentionMLP(attention="head_wise", **FULL)),
    (language_model, texts, operators.Projection(**FULL)),
    (language_model, texts, operators.MLP(correction="low-rank", rank=4)),
]


@pytest.mark.parametrize(
    ("build", "data", "operator"), CASES, ids=lambda c: c.label() if hasattr(c, "label") else ""
)
def test_a_fit_is_never_worse_than_removal_on_held_out_batches(build, data, operator) -> None:  # type: ignore[no-untyped-def]
    model, batches = build(), data()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = replearn.plan(model, 2, operator=operator)
    report = replearn.calibrate_(model, plan, batches, correction="none")
    assert [fit.name for fit in report.fits] == [target.name for target in plan.targets]
    for fit in report.fits:
        assert fit.error <= fit.removal_error, fit
    if "correction" in operator.label() or operator.to_dict().get("correction") == "full":
        assert all(fit.error < 0.95 * fit.removal_error for fit in report.fits)
    assert "error" in str(report)
    assert not model.training
    after = model.state_dict()
    targets = tuple(f"{target.name}." for target in plan.targets)
    for name, tensor in state.items():
        if not name.startswith(targets):
            assert torch.equal(after[name], tensor), name
    replearn.deploy(model, example=batches[0])
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == plan.parameters_after


class Linear(nn.Module):
    """A block that is already of the operator's form: x + conv(x), then ReLU."""

    replearn_anatomy = replearn.anatomy(
        "exact", "basic", conv1="conv1", conv2="conv2", norm="norm", activation="act"
    )

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(x + self.norm(self.conv2(x)))
        return out


def test_a_block_of_the_operators_own_form_is_reproduced_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Linear() for _ in range(3))).double()
    for _ in range(5):
        model(torch.randn(16, 3, 8, 8, dtype=torch.float64))
    model.eval()
    batches = [torch.randn(16, 3, 8, 8, dtype=torch.float64) for _ in range(4)]
    expected = model(batches[0])
    fitted = copy.deepcopy(model)
    plan = replearn.plan(fitted, 2, operator=operators.Basic(correction="full"))
    report = replearn.calibrate_(fitted, plan, batches)
    assert report.fits[0].error < 1e-10
    torch.testing.assert_close(fitted(batches[0]), expected, rtol=1e-4, atol=1e-5)


def test_later_fits_see_earlier_replacements() -> None:
    both, batches = resnet(), images(12)
    plan = replearn.plan(both, targets=["layer1.1", "layer2.1"], operator=operators.Basic(correction="full"))
    replearn.calibrate_(both, plan, batches)
    alone = resnet()
    single = replearn.plan(alone, targets=["layer2.1"], operator=operators.Basic(correction="full"))
    replearn.calibrate_(alone, single, batches)
    key = "layer2.1.corrections.kernel.delta"
    assert not torch.equal(both.state_dict()[key], alone.state_dict()[key])


def test_one_batch_is_enough_and_its_last_samples_are_held_out() -> None:
    model = resnet()
    report = replearn.calibrate_(model, replearn.plan(model, 2), [images(12)[0]])
    assert report.num_samples == 16


@pytest.mark.parametrize("count", [2, 3, 7])
def test_no_batch_is_lost_and_every_fifth_is_held_out(count: int) -> None:
    model = resnet()
    plan = replearn.plan(model, targets=["layer1.1"])
    batches = images(12, count)
    assert replearn.calibrate_(resnet(), plan, batches).num_samples == sum(map(len, batches))
    seen = list(observe(model.eval(), plan.targets[0], batches))
    assert [call.held_out for call in seen] == [number % 5 == 1 for number in range(count)]
    inputs: list[torch.Tensor] = []
    model.layer1[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    for batch in batches:
        model(batch)
    assert all(torch.equal(call.x, x) for call, x in zip(seen, inputs, strict=True))


@pytest.mark.parametrize(("build", "size"), [(resnet, 12), (vit, 16), (bottlenecks, 16)])
def test_by_default_an_operator_is_corrected_and_keeps_more_than_removal(build: Any, size: int) -> None:
    model, batches = build(), images(size)
    plan = replearn.plan(model, 2)
    report = replearn.calibrate_(model, plan, batches)
    assert all(fit.error < 0.8 * fit.removal_error for fit in report.fits)
    own = plan_of(model)
    assert {target.operator.to_dict()["correction"] for target in own.targets} == {"full"}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == own.parameters_after


def test_low_ranks_and_more_free_maps_fit_better() -> None:
    """What an operator may choose freely can only help: span, low rank, full."""
    batches = images(16, count=4)
    errors = []
    for options in ({}, {"correction": "low-rank", "rank": 4}, {"correction": "full"}):
        model = bottlenecks()
        plan = replearn.plan(model, targets=["1.1"], operator=operators.ReducedBottleneck(**options))
        errors.append(replearn.calibrate_(model, plan, batches, correction="none").fits[0].error)
    assert errors[2] < errors[0]
    assert errors[1] <= 1.02 * errors[0]


def test_a_branch_that_cannot_be_trained_is_scaled_and_deployed_with_its_scale() -> None:
    model, batches = vit(), images(16, count=3)
    plan = replearn.plan(model, 2, operator=operators.MLP())
    report = replearn.calibrate_(model, plan, batches)
    operator = model.blocks[1]
    assert operator.gain != 1
    assert all(fit.error <= fit.removal_error for fit in report.fits)
    plain = replearn.deploy(model, example=batches[0])
    torch.testing.assert_close(plain(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-5)
    operator.zero_branch()
    x = torch.randn(2, 5, 24)
    assert torch.equal(operator.compute(x), x)


SUBJECTS = {
    "basic": (resnet, lambda: images(12, count=3), {"interval": 2}),
    "bottleneck": (bottlenecks, lambda: images(16, count=3), {"interval": 2}),
    "transformer": (vit, lambda: images(16, count=3), {"interval": 4, "first": 2}),
}


WALK = [
    (name, kind)
    for name, options in sorted(operators.available().items())
    for kind in SUBJECTS
    if kind in options.kinds
]


@pytest.mark.parametrize(("name", "kind"), WALK)
def test_every_operator_of_the_folder_is_fitted_no_worse_than_removal(name: str, kind: str) -> None:
    """Measured here on the held-out batch itself, in the model as it is once everything before is replaced."""
    options = operators.available()[name]
    build, data, placement = SUBJECTS[kind]
    model, batches = build(), data()
    plan = replearn.plan(model, operator=options(), **placement)
    blocks = {target.name: model.get_submodule(target.name) for target in plan.targets}
    report = replearn.calibrate_(model, plan, batches)
    for fit in report.fits:
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(fit.name).register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].clone())
        )
        with torch.no_grad():
            model(batches[1])
            handle.remove()
            x = seen[0]
            y = blocks[fit.name].eval()(x.clone())
            made = model.get_submodule(fit.name)(x)
        error, removal = float((made - y).square().sum()), float((x - y).square().sum())
        assert error <= removal * (1 + 1e-5), (fit, error, removal)
        assert fit.error / fit.removal_error == pytest.approx(error / removal, rel=1e-3, abs=1e-6)


def test_decoders_that_need_positions_and_fill_caches_are_fitted() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 50}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    plan = replearn.plan(model, 2, operator=operators.Projection(correction="full"))
    report = replearn.calibrate_(model, plan, texts()[:3])
    assert all(fit.error < fit.removal_error for fit in report.fits)
    assert model.generate(**texts()[0], max_new_tokens=3, do_sample=False).shape == (12, 23)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "calibration data is empty"),
        (iter([torch.randn(4, 3, 12, 12)]), "not an iterator"),
        ([torch.randn(4, 5, 12, 12)], r"could not be run on calibration batch 0.*forward=lambda"),
        ([torch.full((4, 3, 12, 12), float("nan"))] * 2, "NaN or infinity"),
    ],
)
def test_bad_data_is_refused_and_the_model_unchanged(data: object, message: str) -> None:
    model = resnet()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    with pytest.raises(ReplearnError, match=message):
        replearn.calibrate_(model, replearn.plan(model, 2), data)  # type: ignore[arg-type]
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_loader_with_labels_is_used_through_forward() -> None:
    model = resnet()
    loader = [(batch, torch.zeros(len(batch))) for batch in images(12)]
    report = replearn.calibrate_(model, replearn.plan(model, 2), loader, forward=lambda m, b: m(b[0]))
    assert len(report.fits) == 3


def test_operators_of_a_stage_in_eval_mode_stay_in_it() -> None:
    model = tiny.resnet().train()
    model.layer1.eval()  # as a frozen backbone is
    replearn.calibrate_(model, replearn.plan(model, first=2), [torch.randn(4, 3, 8, 8) for _ in range(3)])
    assert [stage[1].training for stage in (model.layer1, model.layer2)] == [False, True]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "takes a list or a loader of batches, got NoneType"),
        ([None], "could not be run on calibration batch 0"),
        ([torch.randn(8, 3, 8, 8), torch.randn(0, 3, 8, 8)], "Calibration batch 1 has no samples"),
        ([torch.full((8, 3, 8, 8), 1e30)] * 2, r"layer1\.1 can't be fitted: its .* would be inf or NaN"),
    ],
)
def test_data_that_gives_no_fit_leaves_the_model_as_it_was(data: Any, says: str) -> None:
    model = tiny.resnet().eval()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ReplearnError, match=says) as caught:
        replearn.calibrate_(model, replearn.plan(model, 2, first=2), data)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("decay", ["x", float("nan"), -1, float("inf"), True])
def test_a_weight_decay_is_a_number_from_0_up(decay: Any) -> None:
    with pytest.raises(ReplearnError, match="write a number from 0 up"):
        replearn.param_groups(tiny.resnet(), decay)
