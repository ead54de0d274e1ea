"""Narrow convolutions against torch's own: in Triton's interpreter here, for real on a GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_runs import noting_runs
from interpreting import HERE, INTERPRETED, interpret, runs_kernels
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.functional import conv2d as torch_conv2d
from torch.utils.checkpoint import checkpoint

import replearn
from replearn.fast.kernels import conv3x3_small as operation
from replearn.fast.kernels._triton import conv3x3_small_tiles as tiles
from replearn.fast.kernels.conv3x3_small import conv2d, kernels_run_on
from replearn.fast.train import conv3x3_small as swapped
from replearn.fast.train.conv3x3_small import NarrowConv2d, find_narrow, narrow_convolutions

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter holds bfloat16 as 16-bit integers, and multiplies those."""
    if not INTERPRETED:
        return
    import numpy
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        return plain(self, widened(a), widened(b), d, *how)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def quick_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer products for the interpreter, where it is not the kernels that are tested."""
    if INTERPRETED:
        for channels in tiles.CHANNELS:
            monkeypatch.setitem(tiles.TILES, channels, replace(tiles.TILES[channels], pack=True))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What our kernels were launched for, in order."""
    from replearn.fast.kernels._triton import conv3x3_small as kernels
    from replearn.fast.kernels._triton import conv3x3_small_wgrad as weight_kernels

    found: list[str] = []
    for home, name in ((kernels, "launch_convolve"), (weight_kernels, "launch_weight")):
        launch = getattr(home, name)

        def noted(*given: Any, name: str = name, launch: Any = launch) -> Any:
            found.append(name.removeprefix("launch_"))
            return launch(*given)

        monkeypatch.setattr(home, name, noted)
    return found


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=HERE).to(dtype).contiguous(memory_format=LAST)


def distance(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    assert found.shape == expected.shape
    return float((found.double() - expected.detach()).norm() / expected.detach().norm())


HALF, BRAIN = torch.float16, torch.bfloat16
SHAPES = [
    (16, 16, 2, 7, 5, HALF),  # an odd number of columns: no pairs of pixels
    (16, 32, 9, 2, 16, HALF),  # columns of several tiles
    (32, 16, 1, 17, 4, BRAIN),  # rows of several strips
    (32, 32, 1, 5, 6, BRAIN),
    (32, 16, 1, 1, 1, HALF),  # nothing but border
    (3, 16, 2, 5, 6, BRAIN),  # a first layer
]


@runs_kernels
@pytest.mark.parametrize(("cin", "cout", "images", "height", "width", "dtype"), SHAPES)
def test_values_and_gradients_are_torchs(
    cin: int, cout: int, images: int, height: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = drawn(images, cin, height, width, dtype=dtype).requires_grad_()
    weight = torch.randn(cout, cin, 3, 3, device=HERE, requires_grad=True)
    with torch.autocast(HERE, dtype):
        y = conv2d(x, weight)
    grad = torch.randn_like(y)
    y.backward(grad)
    rounded = weight.detach().to(dtype).double().requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = torch_conv2d(exact, rounded, padding=1)
    expected.backward(grad.double())
    assert y.dtype is dtype
    assert y.is_contiguous(memory_format=LAST)
    # the interpreter cuts bfloat16 off where a GPU rounds
    rounding = torch.finfo(dtype).eps / (1 if INTERPRETED and dtype is torch.bfloat16 else 2)
    assert distance(y.detach(), expected) < rounding
    assert distance(x.grad, exact.grad) < rounding
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert distance(weight.grad, rounded.grad) < 1e-6  # summed in float32, and never rounded to less


TILES = [
    tiles.Tile(pixels=pixels, strip=strip, pack=pack, num_warps=4, num_stages=2)
    for pixels, strip, pack in [(16, 3, False), (32, 4, True)]
]
WEIGHT_TILES = [
    tiles.WeightTile(pixels=32, strip=strip, workers=workers, num_warps=4, num_stages=2, **how)
    for strip, workers, how in [
        (3, 2, {"roll": 0}), (4, 3, {"roll": 0, "split": True}), (3, 2, {"roll": 2}),
        (100, 1, {"roll": 4}), (3, 2, {"roll": 2, "carry": True}),
    ]
]  # fmt: skip


@runs_kernels
@pytest.mark.parametrize(
    ("cin", "cout", "width"),
    [(16, 32, 10), (32, 16, 9), (3, 16, 10)],  # an odd number of columns has no pairs of pixels
)
def test_every_way_of_cutting_the_work_gives_the_same(cin: int, cout: int, width: int) -> None:
    from replearn.fast.kernels._triton.conv3x3_small import launch_convolve
    from replearn.fast.kernels._triton.conv3x3_small_wgrad import launch_weight

    torch.manual_seed(0)
    x, grad, weight = drawn(2, cin, 4, width), drawn(2, cout, 4, width), drawn(cout, cin, 3, 3)
    exact, rounded = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch_conv2d(exact, rounded, padding=1)
    expected.backward(grad.double())
    for tile in TILES:
        y, back = torch.empty_like(grad), torch.empty_like(x)
        launch_convolve(x, weight, y, False, tile)
        launch_convolve(grad, weight, back, True, tile)
        assert distance(y, expected) < 5e-4, tile
        assert distance(back, exact.grad) < 5e-4, tile
    for weight_tile in WEIGHT_TILES:
        partials = launch_weight(x, grad, weight_tile)
        assert distance(partials.sum(0).permute(0, 3, 1, 2), rounded.grad) < 1e-6, weight_tile


@runs_kernels
def test_every_workers_part_is_summed() -> None:
    from replearn.fast.kernels._triton.conv3x3_small_wgrad import launch_sum

    partials = torch.randn(259, 4, 3, 3, 1, device=HERE)  # neither number fills its last tile
    assert distance(launch_sum(partials), partials.double().sum(0)) < 1e-6


@runs_kernels
@pytest.mark.usefixtures("quick_tiles")
def test_only_the_gradients_that_are_needed_are_computed(launches: list[str]) -> None:
    x, weight = drawn(1, 16, 2, 2), drawn(16, 16, 3, 3)
    conv2d(x, weight.requires_grad_()).sum().backward()
    assert launches == ["convolve", "weight"]  # as in a first layer
    launches.clear()
    conv2d(x.requires_grad_(), weight.detach()).sum().backward()
    assert launches == ["convolve", "convolve"]  # as with a frozen weight
    launches.clear()
    with torch.no_grad():
        conv2d(x, weight)
    assert launches == ["convolve"]


@runs_kernels
@pytest.mark.usefixtures("quick_tiles")
def test_gradients_and_weights_may_lie_in_any_order() -> None:
    torch.manual_seed(0)
    x, weight = drawn(2, 16, 2, 3).requires_grad_(), drawn(16, 16, 3, 3).contiguous().requires_grad_()
    grad = torch.randn(2, 16, 2, 3, device=HERE).half()
    found = torch.autograd.grad(conv2d(x, weight), (x, weight), grad)
    expected = torch.autograd.grad(conv2d(x, weight), (x, weight), grad.contiguous(memory_format=LAST))
    one = torch.autograd.grad(conv2d(x, weight).sum(), x)[0]  # a gradient of stride 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(one, torch.autograd.grad(conv2d(x, weight), x, torch.ones_like(x))[0])


@runs_kernels
@pytest.mark.usefixtures("quick_tiles")
def test_the_operations_keep_torchs_contract() -> None:
    x, weight = drawn(1, 16, 2, 2).requires_grad_(), drawn(32, 16, 3, 3).requires_grad_()
    torch.library.opcheck(operation.narrow_convolution, (x, weight, False))
    inputs = (x.detach(), drawn(1, 32, 2, 2), torch.float32)
    torch.library.opcheck(operation.narrow_convolution_weight, inputs)


# ---- which convolutions -----------------------------------------------------------------------------------------


def test_elsewhere_it_is_torchs_own_convolution() -> None:
    x, weight = torch.randn(2, 16, 5, 5), torch.randn(16, 16, 3, 3)
    assert torch.equal(conv2d(x, weight), torch_conv2d(x, weight, padding=1))
    with pytest.raises(RuntimeError, match="expected input"):
        conv2d(torch.randn(2, 8, 5, 5), weight)


def test_what_the_kernels_take() -> None:
    def taken(shape: tuple[int, ...] = (2, 16, 8, 8), **how: Any) -> bool:
        format = LAST if how.get("last", True) else torch.contiguous_format
        with FakeTensorMode():  # shapes without memory
            weight = torch.empty(how.get("weight", (16, 16, 3, 3)), dtype=how.get("of", torch.bfloat16))
            x = torch.empty(shape, dtype=how.get("dtype", torch.bfloat16), memory_format=format)
            return operation.fits(x, weight)

    assert taken()
    with torch.autocast("cpu", torch.bfloat16):
        assert taken(of=torch.float32)
        assert taken(dtype=torch.float32, of=torch.float32)
    assert taken(dtype=torch.float16, of=torch.float16)
    assert taken((1, 32, 7, 5), weight=(16, 32, 3, 3))
    assert taken((1, 3, 7, 5), weight=(16, 3, 3, 3))
    assert not taken((1, 16, 7, 5), weight=(3, 16, 3, 3))
    assert not taken((1, 64, 7, 5), weight=(64, 64, 3, 3))  # cuDNN's own are as fast
    assert not taken(last=False)
    assert not taken(dtype=torch.float32, of=torch.float32)
    assert not taken(of=torch.float32)  # without autocast
    assert not taken((2, 8, 8, 8), weight=(16, 8, 3, 3))
    assert not taken(weight=(128, 16, 3, 3))
    assert not taken(weight=(16, 16, 1, 1))
    assert not taken((0, 16, 8, 8))
    assert taken((2**15, 16, 64, 63))
    assert not taken((2**15, 16, 64, 64))  # 2**31 numbers
    assert not taken((2**14, 16, 64, 64), weight=(32, 16, 3, 3))  # the result has as many


def test_a_models_convolutions_are_exchanged_and_come_back() -> None:
    model, other = replearn.models.CifarResNet(8, width=16), replearn.models.CifarResNet(20, width=16)
    replearn.replace_(other, replearn.plan(other, 2))
    kept = [model.layer1[0].conv1, model.layer2[0].conv2]
    keys, seen = list(model.state_dict()), list(model.parameters())
    assert model.conv1 in find_narrow(model)  # three channels
    assert model.layer2[0].conv1 not in find_narrow(model)  # stride 2
    assert model.layer3[0].conv2 not in find_narrow(model)  # 64 channels
    with narrow_convolutions(model):
        assert {type(conv) for conv in kept} == {NarrowConv2d}
        with narrow_convolutions(model):
            pass
        assert {type(conv) for conv in kept} == {NarrowConv2d}  # an inner one takes nothing away
        assert list(model.state_dict()) == keys
        assert all(isinstance(conv, nn.Conv2d) for conv in pickle.loads(pickle.dumps(kept)))
    assert {type(conv) for conv in kept} == {nn.Conv2d}
    with pytest.raises(RuntimeError), narrow_convolutions(model):
        model(torch.zeros(1, 5, 8, 8))
    assert {type(conv) for conv in kept} == {nn.Conv2d}
    assert all(one is other for one, other in zip(model.parameters(), seen, strict=True))
    assert any(conv is other.layer1[1].conv.shell for conv in find_narrow(other))  # an operator's own


@pytest.mark.parametrize(
    "change",
    [{"bias": True}, {"groups": 2}, {"dilation": 2, "padding": 2}, {"stride": 2}, {"padding": 0},
     {"padding_mode": "reflect"}, {"kernel_size": 1, "padding": 0}, {"out_channels": 48}],
)  # fmt: skip
def test_other_convolutions_stay(change: dict[str, Any]) -> None:
    how = {"in_channels": 16, "out_channels": 16, "kernel_size": 3, "padding": 1, "bias": False}
    assert find_narrow(nn.Sequential(nn.Conv2d(**how)))
    assert find_narrow(nn.Sequential(nn.Conv2d(**{**how, "padding": "same"})))
    assert not find_narrow(nn.Sequential(nn.Conv2d(**{**how, **change})))


class Own(nn.Conv2d):
    """Somebody's convolution, with ideas of its own."""


def test_subclasses_are_left_to_their_authors_and_shared_ones_are_found_once() -> None:
    shared = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    model = nn.Sequential(Own(16, 16, 3, padding=1, bias=False), shared, nn.Sequential(shared))
    assert find_narrow(model) == [shared]


# ---- models -----------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, x: Tensor, call: Any = None, dtype: torch.dtype | None = torch.float16) -> Tensor:
    model.zero_grad()
    with torch.autocast(HERE, dtype, cache_enabled=False) if dtype else nullcontext():
        out = (model if call is None else call)(x)
    out.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def subject() -> tuple[nn.Module, Tensor, Tensor]:
    """A model of learned and replaced blocks in channels_last, its input, and float32's gradients."""
    torch.manual_seed(0)
    model = replearn.models.CifarResNet(20, width=16)
    replearn.replace_(model, replearn.plan(model, targets=["layer1.1"]))
    model.layer1 = model.layer1[:2]
    model.layer2, model.layer3, model.fc = nn.Identity(), nn.Identity(), nn.Linear(16, 10)
    model.to(HERE, memory_format=LAST)
    x = torch.randn(2, 3, 3, 4, device=HERE).contiguous(memory_format=LAST)
    return model, x, gradients(model, x, dtype=None).double()


@runs_kernels
@pytest.mark.usefixtures("quick_tiles")
def test_a_model_learns_the_same_eagerly_and_compiled(launches: list[str]) -> None:
    model, x, exact = subject()
    plain = distance(gradients(model, x), exact)
    with narrow_convolutions(model):
        assert distance(gradients(model, x), exact) < 1.3 * plain
    kernels = sorted(launches)
    assert kernels.count("weight") == len(find_narrow(model))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    launches.clear()
    gradients(model, x, compiled)
    assert launches == []
    with narrow_convolutions(model):
        assert distance(gradients(model, x, compiled), exact) < 1.3 * plain
    assert sorted(launches) == kernels  # the compiled model noticed
    gradients(model, x, compiled)
    assert sorted(launches) == kernels  # and notices when they are gone


@runs_kernels
@pytest.mark.usefixtures("quick_tiles")
def test_a_recomputed_block_computes_what_it_did(launches: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.ReLU()).to(HERE, memory_format=LAST)
    x = torch.randn(2, 16, 2, 3, device=HERE).contiguous(memory_format=LAST).requires_grad_()
    with narrow_convolutions(model):
        expected = gradients(model, x)
        assert sorted(launches) == ["convolve", "convolve", "weight"]
        launches.clear()
        found = gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert sorted(launches) == ["convolve", "convolve", "convolve", "weight"]
    torch.testing.assert_close(found, expected)


def test_a_run_uses_them_where_its_recipe_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def noted(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(x.shape)
        return torch_conv2d(x, weight, padding=1)

    monkeypatch.setattr(swapped, "conv2d", noted)
    notes = noting_runs(
        tmp_path, monkeypatch, "narrow_convolutions", model="cifar_resnet:8:16", channels_last=True
    )
    assert "narrow" not in notes("off", narrow_convolutions=False)
    assert "narrow" not in notes("layout", channels_last=False)
    assert "narrow" not in notes("eager", compile=False)
    assert seen == []
    assert "3 narrow convolutions by Triton kernels" in notes("on")
    assert seen
    assert len(seen) % 3 == 0


@runs_kernels
def test_forward_mode_derivatives_and_compiled_ones_are_torchs(launches: list[str]) -> None:
    x, tangent = (torch.randn(1, 16, 4, 4, device=HERE).half().to(memory_format=LAST) for _ in range(2))
    weight = torch.randn(16, 16, 3, 3, device=HERE).half().to(memory_format=LAST)
    conv2d(x, weight)
    assert launches == ["convolve"]  # it fits
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(conv2d(forward_ad.make_dual(x, tangent), weight))
    torch.testing.assert_close(made.tangent, torch_conv2d(tangent, weight, padding=1))

    def total(x: Tensor) -> Tensor:
        return conv2d(x, weight).float().sum()

    compiled: Any = torch.compile(torch.func.grad(total), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.func.grad(total)(x))
    assert launches == ["convolve"]


def test_the_kernels_run_in_tritons_interpreter() -> None:
    interpret(__file__, "values or every or only or order or contract or learns or recomputed or forward_mode")


# ---- on a GPU ---------------------------------------------------------------------------------------------------

REAL = [(16, 32, 256), (32, 16, 256)]
needs_gpu = pytest.mark.skipif(HERE == "cpu", reason="needs a GPU")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize(("channels", "side", "images"), REAL)
def test_real_sizes_agree_and_repeat_to_the_bit(channels: int, side: int, images: int) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x = drawn(images, channels, side, side, dtype=dtype).requires_grad_()
    weight = (0.1 * drawn(channels, channels, 3, 3, dtype=dtype)).requires_grad_()
    grad = drawn(images, channels, side, side, dtype=dtype)
    y = conv2d(x, weight)
    found = (y, *torch.autograd.grad(y, (x, weight), grad))
    exact, rounded = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch_conv2d(exact, rounded, padding=1)
    wanted = (expected, *torch.autograd.grad(expected, (exact, rounded), grad.double()))
    for one, other in zip(found, wanted, strict=True):
        assert distance(one.detach(), other) < 3e-3
    again = conv2d(x, weight)
    for one, other in zip(found, (again, *torch.autograd.grad(again, (x, weight), grad)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("backend", ["captured", "compiled"])
@pytest.mark.parametrize("label", ["E2E", "RepL"])
def test_fifty_steps_with_our_kernels_are_fifty_of_cudnn(backend: Any, label: str) -> None:
    from replearn.experiments.bench.cases import SGD, Case, candidates
    from replearn.experiments.bench.steps import TrainingStep, losses, precision_of

    slow = replace(SGD, lr=0.002)  # at a large rate on random labels, rounding alone decides where training goes
    case = Case(model="cifar_resnet:20:16", batch_size=64, interval=2, optimizer=slow)
    side = next(side for side in candidates(case) if side.label == label)
    with precision_of(backend):
        ours = losses(TrainingStep(case, side, backend, torch.device("cuda")), 50)
        theirs = losses(TrainingStep(case, side, backend, torch.device("cuda"), narrow=False), 50)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.cuda
@needs_gpu
def test_a_step_runs_our_kernels_and_copies_nothing_for_them() -> None:
    from torch.profiler import ProfilerActivity, profile

    from replearn.experiments.bench.cases import Case, candidates
    from replearn.experiments.bench.steps import TrainingStep, precision_of

    case = Case(model="resnet32", batch_size=64)
    with precision_of("captured"):
        step = TrainingStep(case, candidates(case)[0], "captured", torch.device("cuda"))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step.body()
            torch.cuda.synchronize()
    counts = {event.key: event.count for event in found.key_averages()}
    convolutions = len(find_narrow(step.model))
    assert convolutions == 20
    assert counts.get("weight_kernel", 0) + counts.get("rolling_weight_kernel", 0) == convolutions
    assert counts["sum_kernel"] == convolutions
    assert counts["convolve_kernel"] == 2 * convolutions - 1  # images have no gradient
    assert copy.deepcopy(step.model).layer1[0].conv1.__class__ is nn.Conv2d
    assert kernels_run_on(torch.device("cuda"))
