"""BatchNorm, sum and ReLU as one against torch's own: in Triton's interpreter here, for real on a GPU."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alike import learned_alike
from interpreting import HERE, interpret, runs_kernels
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import replearn
from replearn.costs.precision import float32_products
from replearn.fast.graphs import capture as capturing
from replearn.fast.kernels import bn_add_relu as operation
from replearn.fast.kernels.bn_add_relu import FusedBatchNorm2d, normed
from replearn.fast.train.bn_add_relu import fused_norms, num_fused
from replearn.fast.train.known_blocks import KNOWN, says
from replearn.operators._base.recompute import recomputed

LAST = torch.channels_last


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What our kernels were launched for, in order."""
    pytest.importorskip("triton")
    from replearn.fast.kernels._triton import bn_add_relu as kernels

    found: list[str] = []
    for name in ("statistics", "apply", "slopes", "gradient"):
        launch = getattr(kernels, f"launch_{name}")

        def noted(*given: Any, name: str = name, launch: Any = launch, **more: Any) -> Any:
            both = name == "slopes" and given[1] is not None
            found.append(f"{name} of two" if both else name)
            return launch(*given, **more)

        monkeypatch.setattr(kernels, f"launch_{name}", noted)
    return found


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing._here, "recording", True)  # as it is on the side stream


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=HERE).to(dtype).contiguous(memory_format=LAST)


def norm_of(channels: int, **how: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, **how).to(HERE)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def fused(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    twin = copy.deepcopy(norm)
    object.__setattr__(twin, "__class__", FusedBatchNorm2d)
    return twin


def results(norm: nn.BatchNorm2d, x: Tensor, u: Tensor | None, weigh: Tensor) -> list[Tensor]:
    x, u = x.clone().requires_grad_(), None if u is None else u.clone().requires_grad_()
    y = normed(x, norm, nn.ReLU(inplace=True), u)
    inputs = [x, *norm.parameters(), *([] if u is None else [u])]
    return [y.detach(), *torch.autograd.grad(y, inputs, weigh)]


@runs_kernels
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(2, 16, 3, 5), (3, 48, 7, 7), (1, 256, 1, 2), (33, 64, 4, 4)])
def test_the_kernels_compute_outputs_gradients_and_running_statistics(
    shape: tuple[int, ...], added: bool, launches: list[str]
) -> None:
    torch.manual_seed(0)
    norm = norm_of(shape[1], eps=1e-3, momentum=0.3)
    twin = fused(norm)
    for step in range(3):
        x, u, weigh = (drawn(*shape) + 5 * number for number in (2, 0, 0))
        u = u if added else None
        expected, found = results(norm, x, u, weigh), results(twin, x, u, weigh)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert len(launches) == 4 * (step + 1)
        assert all(tensor.is_contiguous(memory_format=LAST) for tensor in found if tensor.dim() == 4)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(norm.named_buffers()), rtol=1e-5, atol=1e-5)
    assert int(twin.num_batches_tracked or 0) == 3


@runs_kernels
@pytest.mark.parametrize("added", [False, True])
def test_half_precision_is_computed_in_float32(added: bool) -> None:
    torch.manual_seed(0)
    norm = norm_of(32)
    x, u, weigh = (drawn(8, 32, 5, 5) for _ in range(3))
    half = [tensor.half() for tensor in (x, u, weigh)]
    exact = results(norm, *(tensor.float() if added or n != 1 else None for n, tensor in enumerate(half)))  # type: ignore[arg-type]
    found = results(fused(norm), half[0], half[1] if added else None, half[2])
    assert found[0].dtype is torch.float16
    assert found[2].dtype is torch.float32
    for one, other in zip(found, exact, strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 2e-3


@runs_kernels
def test_what_is_no_number_stays_that_and_a_large_mean_costs_no_digits() -> None:
    torch.manual_seed(0)
    norm, x = norm_of(16), drawn(4, 16, 4, 4)
    x[1, 3, 2, 2] = float("nan")
    expected, found = norm(x).relu(), normed(x, fused(norm), nn.ReLU())
    assert bool(found[:, 3].isnan().all())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    far = drawn(64, 16, 8, 8) + 1000
    exact = copy.deepcopy(norm).double()(far.double()).relu().float()
    torch.testing.assert_close(normed(far, fused(norm), nn.ReLU()), exact, rtol=1e-3, atol=1e-3)


@runs_kernels
@pytest.mark.parametrize(
    ("how", "given"),
    [
        ({"momentum": None}, {}),
        ({"affine": False}, {}),
        ({}, {"eval": True}),
        ({}, {"order": torch.contiguous_format}),
        ({}, {"hook": True}),
        ({}, {"activation": nn.GELU()}),
        ({}, {"dtype": torch.float64}),
        ({}, {"u": torch.float16}),
        ({}, {"strided": True}),
        ({}, {"uncounted": True}),
        ({}, {"patched": True}),
    ],
)
def test_what_the_kernels_do_not_know_is_computed_as_ever(
    how: dict[str, Any], given: dict[str, Any], launches: list[str]
) -> None:
    torch.manual_seed(0)
    dtype = given.get("dtype", torch.float32)
    norm = norm_of(16, **how).to(dtype)
    twin = fused(norm)
    heard = []
    if given.get("hook"):
        twin.register_forward_hook(lambda *call: heard.append(1))
    if given.get("eval"):
        norm.eval(), twin.eval()
    for one in (norm, twin):
        if given.get("strided"):
            one.weight = nn.Parameter(torch.arange(32.0, device=HERE)[::2])
        if given.get("uncounted"):
            one.num_batches_tracked = None
        if given.get("patched"):
            one.forward = lambda x: x * 0.5  # type: ignore[method-assign]
    x = torch.randn(4, 16, 3, 3, device=HERE, dtype=dtype).contiguous(memory_format=given.get("order", LAST))
    u = torch.randn(4, 16, 3, 3, device=HERE, dtype=given.get("u", dtype)).contiguous(memory_format=LAST)
    activation = given.get("activation", F.relu)
    torch.testing.assert_close(normed(x, twin, activation, u), activation(u + norm(x)))
    torch.testing.assert_close(twin.running_var, norm.running_var)
    assert not launches
    assert len(heard) == int(given.get("hook", False))


@runs_kernels
def test_a_norm_without_running_statistics_is_known_too(launches: list[str]) -> None:
    norm, x = norm_of(16, track_running_stats=False), drawn(4, 16, 3, 3)
    torch.testing.assert_close(normed(x, fused(norm), F.relu), norm(x).relu(), rtol=1e-4, atol=1e-4)
    assert launches == ["statistics", "apply"]


@runs_kernels
def test_a_layer_that_is_recomputed_moves_its_statistics_once(launches: list[str]) -> None:
    torch.manual_seed(0)
    norm, x, u = norm_of(16), drawn(4, 16, 3, 3).requires_grad_(), drawn(4, 16, 3, 3)
    twin, again = fused(norm), x.detach().clone().requires_grad_()
    normed(x, norm, F.relu, u).square().sum().backward()
    recomputed(lambda z: normed(z, twin, F.relu, u), twin, again).square().sum().backward()
    assert launches == ["statistics", "apply", "statistics", "apply", "slopes", "gradient"]
    torch.testing.assert_close(again.grad, x.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(norm.named_buffers()), rtol=1e-5, atol=1e-5)


@runs_kernels
def test_a_norm_that_grew_and_one_that_moves_all_the_way_are_computed_right() -> None:
    norm = norm_of(16, momentum=1)
    twin = fused(norm)
    for width in (16, 256):
        for one in (norm, twin):
            one.num_features = width
            one.weight, one.bias = (nn.Parameter(torch.ones(width, device=HERE)) for _ in range(2))
            one.running_mean, one.running_var = torch.zeros(width, device=HERE), torch.ones(width, device=HERE)
        x = drawn(2, width, 3, 3)
        torch.testing.assert_close(normed(x, twin, F.relu), norm(x).relu(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(twin.running_var, norm.running_var, rtol=1e-4, atol=1e-4)


@runs_kernels
def test_gradients_that_are_not_wanted_are_not_computed(launches: list[str]) -> None:
    norm, x = norm_of(16), drawn(4, 16, 3, 3)
    twin = fused(norm)
    normed(x, twin, F.relu).sum().backward()
    assert launches == ["statistics", "apply", "slopes"]
    norm(x).relu().sum().backward()
    assert twin.weight.grad is not None
    torch.testing.assert_close(twin.weight.grad, norm.weight.grad, rtol=1e-4, atol=1e-4)


class Free(nn.Module):
    """A block of one's own, which calls the operation itself."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = normed(self.conv(x), self.bn, F.relu)
        return normed(self.conv2(y), self.bn2, F.relu, x)


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, num_classes=10)
    return model


def timm_model(name: str, **how: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    model: nn.Module = timm.create_model(name, num_classes=10, **how)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "our ResNet-32": (replearn.models.resnet32, 31),
    "our bottlenecks": (lambda: replearn.models.CifarResNet(29, bottleneck=True), 28),
    "torchvision's ResNet-18": (lambda: torchvision_model("resnet18"), 17),
    "torchvision's ResNet-50": (lambda: torchvision_model("resnet50"), 49),
    "torchvision's VGG": (lambda: torchvision_model("vgg11_bn"), 8),
    "timm's ResNet-18": (lambda: timm_model("resnet18"), 17),
    "timm's ResNet-26-D": (lambda: timm_model("resnet26d"), 27),
    "with squeeze and excitation": (lambda: timm_model("seresnet18"), 17),
    "with stochastic depth": (lambda: timm_model("resnet18", drop_path_rate=0.5, drop_rate=0.5), 17),
    "another library's own blocks": (lambda: timm_model("dla34"), 3),  # in sequences
    "layers that are given lists": (lambda: torchvision_model("densenet121"), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_found_in_models_that_we_know(name: str) -> None:
    build, expected = MODELS[name]
    assert num_fused(build()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_on_a_cpu_nothing_changes(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name][0](), torch.randn(2, 3, 64, 64)
    twin = copy.deepcopy(model)
    kinds = [type(module) for module in twin.modules()]
    for train in (True, False):  # the mode may change inside
        torch.manual_seed(1)
        expected = model.train(train)(x)
        with fused_norms(twin):
            torch.manual_seed(1)
            found = twin.train(train)(x)
        assert torch.equal(found, expected)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(model.named_buffers()), rtol=0, atol=0)
    assert [type(module) for module in twin.modules()] == kinds


def test_every_class_that_we_know_has_the_code_that_we_know() -> None:
    """Of the versions that are installed; others are left alone."""
    pytest.importorskip("timm.models.resnet")
    import torchvision.models.resnet

    for known in KNOWN:
        assert known.found() is getattr(sys.modules[known.module], known.kind)
    bottleneck = next(known.code for known in KNOWN if known.kind == "Bottleneck" and known.code)
    assert not says(torchvision.models.resnet.BasicBlock.forward, bottleneck)
    assert not says(None, bottleneck)


def test_a_class_whose_code_is_another_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import resnet

    def forward(self: Any, x: Tensor) -> Tensor:
        return x

    monkeypatch.setattr(resnet.BasicBlock, "forward", forward)
    model = torchvision_model("resnet18")
    with fused_norms(model):
        assert type(model.get_submodule("layer1.0")) is resnet.BasicBlock
        assert type(model) is not resnet.ResNet


def test_copies_and_pickles_that_are_made_inside_are_plain() -> None:
    model = torchvision_model("vgg11_bn")
    with fused_norms(model):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for made in copies:
        assert [type(module) for module in made.modules()] == [type(module) for module in model.modules()]
        torch.testing.assert_close(made.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_the_model_is_as_it_was_after_an_error_and_inside_of_another() -> None:
    model = torchvision_model("resnet18")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError), fused_norms(model), fused_norms(model):
        model(torch.zeros(1, 5, 4, 4))
    assert [type(module) for module in model.modules()] == kinds


def test_hooks_on_what_does_nothing_are_heard() -> None:
    model, heard = timm_model("resnet18"), []
    model.get_submodule("layer1.0.drop_block").register_forward_hook(lambda *call: heard.append(1))
    with fused_norms(model):
        model(torch.randn(2, 3, 32, 32))
    assert heard == [1]


def test_a_model_is_forgotten_when_nobody_has_it() -> None:
    model = torchvision_model("resnet18")
    seen = weakref.ref(model)
    with fused_norms(model):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    del model
    gc.collect()
    assert seen() is None


def test_a_sum_that_is_written_in_place_keeps_the_dtype_of_what_it_is_written_to() -> None:
    norm, x, u = nn.BatchNorm2d(16), torch.randn(2, 16, 3, 3).bfloat16(), torch.randn(2, 16, 3, 3)
    assert normed(x, norm, F.relu, u, written=True).dtype is torch.bfloat16
    assert normed(x, norm, F.relu, u).dtype is torch.float32


@runs_kernels
@pytest.mark.parametrize("recorded", [False, True])
def test_a_whole_network_trains_as_before(
    recorded: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing._here, "recording", recorded)
    torch.manual_seed(0)
    model = replearn.models.CifarResNet(20).to(HERE, memory_format=LAST)  # type: ignore[call-overload]
    replearn.replace_(model, replearn.plan(model, 2))
    twin, x = copy.deepcopy(model), drawn(4, 3, 8, 8)
    with float32_products(tf32=False):
        expected = model(x)
        expected.square().sum().backward()
        with fused_norms(twin):
            found = twin(x)
            found.square().sum().backward()
    assert launches.count("statistics") == num_fused(twin) + 3  # and the operators' own
    assert launches.count("slopes of two") == (6 if recorded else 0)  # every block's input but the wider ones'
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    learned_alike(model, twin, rtol=1e-2, atol=2e-3)


@runs_kernels
@pytest.mark.parametrize("between", ["nothing", "a sum", "a hook", "kept"])
def test_a_gradient_in_two_parts_is_whole_for_whoever_looks(
    between: str, recording: None, launches: list[str]
) -> None:
    torch.manual_seed(0)
    first, second = norm_of(16), norm_of(16)
    x, v = drawn(4, 16, 3, 3), drawn(4, 16, 3, 3).requires_grad_()

    def run(one: nn.BatchNorm2d, other: nn.BatchNorm2d) -> list[Tensor]:
        given, seen = x.clone().requires_grad_(), []
        y = normed(given, one, F.relu, x)
        if between == "a hook":
            y.register_hook(seen.append)
        if between == "kept":
            y.retain_grad()
        z = y + v if between == "a sum" else y
        out = normed(z * 2, other, F.relu, z)
        v.grad = None
        out.square().sum().backward()
        found = [out.detach(), given.grad, *([v.grad] if v.grad is not None else []), *seen]
        return [*found, *([y.grad] if between == "kept" else [])]  # type: ignore[list-item]

    expected, found = run(first, second), run(fused(first), fused(second))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ("slopes of two" in launches) == (between == "nothing")


@runs_kernels
def test_what_was_written_to_since_goes_around_by_itself(recording: None) -> None:
    norm, x = fused(norm_of(16)), drawn(4, 16, 3, 3).requires_grad_()
    y = normed(x, norm, F.relu)
    assert operation.twin_of(y) is not y
    y.add_(1)
    assert operation.twin_of(y) is y


@runs_kernels
def test_gradients_of_gradients_are_refused(launches: list[str]) -> None:
    x = drawn(4, 16, 3, 3).requires_grad_()
    y = normed(x, fused(norm_of(16)), F.relu).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


@runs_kernels
def test_checkpointed_blocks_train_inside(launches: list[str]) -> None:
    torch.manual_seed(0)
    model = Free().to(HERE, memory_format=LAST)  # type: ignore[call-overload]
    twin, x = copy.deepcopy(model), drawn(2, 16, 4, 4)
    with float32_products(tf32=False):
        model(x).square().sum().backward()
        with fused_norms(twin):
            checkpoint(twin, x, use_reentrant=False).square().sum().backward()
    assert launches.count("statistics") == 4
    for one, other in zip(
        model.parameters(), twin.parameters(), strict=True
    ):  # statistics move twice, as torch's do
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-2, atol=1e-3)


def test_the_kernels_run_in_tritons_interpreter() -> None:
    chosen = "kernels_compute or half or number or know or recomputed or wanted or network or parts or since"
    interpret(__file__, f"({chosen} or refused or checkpointed or without or grew) and not that_we_know")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_learns_as_a_plain_one() -> None:
    from replearn.experiments.training.step import CapturedStep

    x, labels = drawn(64, 3, 32, 32), torch.arange(64, device="cuda") % 10

    def trained(captured: bool) -> list[float]:
        torch.manual_seed(0)
        model = replearn.models.resnet32().cuda().to(memory_format=LAST)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loss = torch.zeros((), device="cuda")

        def body() -> None:
            optimizer.zero_grad(set_to_none=True)
            with fused_norms(model) if captured else nullcontext():
                with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                    now = F.cross_entropy(model(x), labels)
                now.backward()
            loss.copy_(now.detach())
            optimizer.step()

        step: Any = CapturedStep(body, model, optimizer, [loss]) if captured else body
        found = []
        for _ in range(50):
            step()
            found.append(float(loss))
        return found

    plain, fast = trained(False), trained(True)
    assert plain[-1] < 0.5 * plain[0]
    assert fast[-1] < 0.5 * fast[0]
    assert max(abs(a - b) for a, b in zip(plain[:10], fast[:10], strict=True)) < 0.1
