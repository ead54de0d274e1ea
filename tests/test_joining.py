"""Convolutions with the sums and ReLUs after them, computed at once: where, the same numbers, and trust."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import replearn
from replearn import ReplearnError
from replearn.fast import conv_fusion as trusting
from replearn.fast.conv_fusion import Fused
from replearn.fast.inlining import flatten, note_values_
from replearn.fast.kernels import conv_bias_add_relu as convolving
from replearn.fast.kernels.conv_bias_add_relu import Computing, Trial, convolve_relu, usual
from replearn.fast.passes import channels_last as ordering
from replearn.fast.passes.conv_bias_add_relu import join_relus_, num_joined

LAST = torch.channels_last
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """relu(conv(relu(conv(x))) + shortcut(x)), written in one of several ways."""

    def __init__(self, last: Callable[[Tensor, Tensor], Tensor], shortcut: nn.Module, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1, **how), nn.Conv2d(6, 6, 3, padding="same")
        self.conv2.padding = (1, 1)
        self.shortcut, self.last = shortcut, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv2(torch.relu(self.conv1(x))), self.shortcut(x))


LASTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda y, x: torch.relu(y + x),
    "other way round": lambda y, x: F.relu(torch.add(x, y)),
    "method": lambda y, x: y.add(x).relu(),
    "in place": lambda y, x: torch.relu_(x + y),
}


def joined(model: nn.Module, example: Tensor = IMAGES) -> tuple[Any, int]:
    flat = flatten(model.eval(), example)
    note_values_(flat, example, None)
    join_relus_(flat)
    return flat, num_joined(flat)


def num_calls(flat: Any, target: Any) -> int:
    return len(flat.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_is_two_operations_and_its_shortcut(last: str, stride: int) -> None:
    shortcut = nn.Conv2d(3, 6, 1, stride=stride)
    model = Block(LASTS[last], shortcut, stride=stride).eval()
    flat, number = joined(model)
    assert number == num_calls(flat, convolve_relu) == 2
    assert num_calls(flat, torch.conv2d) == 1
    assert not any("relu" in str(node.target) and node.target is not convolve_relu for node in flat.graph.nodes)
    torch.testing.assert_close(flat(IMAGES), model(IMAGES))
    (kept,) = flat.graph.find_nodes(op="call_function", target=torch.conv2d)
    assert kept.args[2] is None  # its bias went into the other's
    assert len(list(flat.parameters())) == 5


def test_what_is_no_convolution_is_added_as_it_is() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.conv(x))

    model = Net().eval()
    flat, number = joined(model)
    assert number == 1
    assert torch.equal(flat(IMAGES), model(IMAGES))


@pytest.mark.parametrize("biases", [(False, False), (False, True), (True, False)])
def test_a_bias_that_is_not_there_is_zero(biases: tuple[bool, bool]) -> None:
    layers = [nn.Conv2d(3, 6, 1, bias=bias) for bias in biases]
    model = net(lambda x, one, two: torch.relu(one(x) + two(x)), *layers)
    flat, number = joined(model)
    assert number == 1
    torch.testing.assert_close(flat(IMAGES), model(IMAGES))


def test_of_two_convolutions_the_later_is_joined_and_a_bias_that_is_seen_stays() -> None:
    def code(x: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
        early = one(x)
        return torch.relu(two(x) + early) * early

    model = net(code, nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 1))
    flat, number = joined(model)
    assert number == 1
    (kept,) = flat.graph.find_nodes(op="call_function", target=torch.conv2d)
    assert flat.get_parameter(str(kept.args[1].target)) is model.layer0.weight
    assert kept.args[2] is not None
    torch.testing.assert_close(flat(IMAGES), model(IMAGES))


@pytest.mark.parametrize("widths", [(6, 1), (1, 6)])
def test_a_sum_that_spreads_a_convolution_is_left(widths: tuple[int, int]) -> None:
    model = net(lambda x, one, two: torch.relu(one(x) + two(x)), *(nn.Conv2d(3, width, 1) for width in widths))
    flat, number = joined(model)
    assert number == 0
    assert torch.equal(flat(IMAGES), model(IMAGES))


def net(code: Callable[..., Tensor], *layers: nn.Module) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            for number, layer in enumerate(layers):
                setattr(self, f"layer{number}", layer)

        def forward(self, x: Tensor) -> Tensor:
            return code(x, *[getattr(self, f"layer{number}") for number in range(len(layers))])

    return Net().eval()


def seen_before(x: Tensor, conv: nn.Module) -> Tensor:
    y = conv(x)
    return torch.relu(y) + y


def sum_seen(x: Tensor, conv: nn.Module) -> Tensor:
    y = conv(x) + x
    return torch.relu(y) * y


def written_between(x: Tensor, conv: nn.Module) -> Tensor:
    z = x * 2
    y = conv(z)
    z.add_(1)
    return torch.relu(y) + z


def written_in_place(x: Tensor, conv: nn.Module) -> Tensor:
    y = conv(x)
    torch.relu_(y)
    return y * 2


LEFT = {
    "groups": net(lambda x, conv: torch.relu(conv(x)), nn.Conv2d(3, 6, 3, groups=3)),
    "same": net(lambda x, conv: torch.relu(conv(x)), nn.Conv2d(3, 6, 3, padding="same")),
    "seen before its ReLU": net(seen_before, nn.Conv2d(3, 3, 3, padding=1)),
    "its sum seen": net(sum_seen, nn.Conv2d(3, 3, 3, padding=1)),
    "its input written": net(written_between, nn.Conv2d(3, 3, 3, padding=1)),
    "its result written": net(written_in_place, nn.Conv2d(3, 3, 3, padding=1)),
    "a number added": net(lambda x, conv: torch.relu(conv(x) + x.shape[2]), nn.Conv2d(3, 3, 3)),
    "something smaller added": net(
        lambda x, conv: torch.relu(conv(x) + x.mean((2, 3), keepdim=True)), nn.Conv2d(3, 3, 3)
    ),
    "wider than what is added": net(
        lambda x, one, two: torch.relu(one(x) + two(x)), nn.Conv2d(3, 6, 1, groups=3), nn.Conv2d(3, 1, 1)
    ),
    "a weight that something else reads": net(
        lambda x, conv: torch.relu(conv(x)) * conv.weight.sum(), nn.Conv2d(3, 3, 3)
    ),
    "no batch": net(lambda x, conv: torch.relu(conv(x[0])), nn.Conv2d(3, 3, 3)),
    "added to itself": net(lambda x, conv: torch.relu((y := conv(x)) + y), nn.Conv2d(3, 3, 3)),
    "another function": net(lambda x, conv: F.gelu(conv(x)), nn.Conv2d(3, 3, 3)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_others_see_or_cudnn_has_not_is_left(name: str) -> None:
    model = LEFT[name]
    flat, number = joined(model)
    assert number == 0
    assert torch.equal(flat(IMAGES), model(IMAGES))


def test_a_bias_that_others_read_stays_where_it_is() -> None:
    one, two = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 1)
    model = net(lambda x, a, b, c: torch.relu(a(x) + b(x)) + torch.relu(c(x)), one, two, nn.Conv2d(3, 6, 1))
    model.layer2.bias = two.bias  # type: ignore[union-attr]
    flat, number = joined(model)
    assert number == 2
    torch.testing.assert_close(flat(IMAGES), model(IMAGES))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for cuDNN on a CPU, and notes what it was asked for."""
    asked: list[str] = []

    def at_once(
        x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, stride: Any, padding: Any, dilation: Any
    ) -> Tensor:
        asked.append("conv" if other is None else "sum")
        return usual(x, weight, bias, other, stride, padding, dilation)

    for module in (convolving, trusting):
        monkeypatch.setattr(module, "at_once", at_once)
    monkeypatch.setattr(trusting, "runs_at_once_on", lambda device: True)
    return asked


def resnet() -> nn.Module:
    torch.manual_seed(0)
    model = replearn.models.resnet32()
    return replearn.replace_(model, replearn.plan(model)).eval()


def test_the_first_call_is_a_trial_and_later_ones_are_at_once(cudnn: list[str]) -> None:
    model, x = resnet(), torch.randn(2, 3, 32, 32)
    plain = replearn.deploy(model, x, flatten=True, merge=True)
    fused = replearn.deploy(model, x, flatten=True, merge=True, fuse=True)
    assert isinstance(fused, Fused)
    joined = num_calls(fused.model, convolve_relu)
    assert joined == num_calls(plain, torch.relu_) + num_calls(plain, torch.relu) > 10
    with torch.inference_mode():
        first = fused(x)
        assert len(cudnn) == joined  # each was tried once
        assert fused.num_kinds == 1
        second = fused(x)
        assert len(cudnn) == 2 * joined
        assert fused(x[:1]).shape[0] == 1
        assert fused.num_kinds == 2
    for found in (first, second):
        torch.testing.assert_close(found, plain(x), rtol=1e-5, atol=1e-5)


def test_gradients_traces_other_threads_and_modes_are_torchs(cudnn: list[str]) -> None:
    x = torch.randn(2, 3, 32, 32)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    with torch.no_grad():
        fused(x)
        cudnn.clear()
        fused(x)
        assert cudnn
        cudnn.clear()
        with torch.backends.cudnn.flags(enabled=False):
            fused(x)
        with FlopCounterMode(display=False) as counter:
            fused(x)
        assert counter.get_total_flops() > 0
        torch.export.export(fused, (x,))
        torch.jit.trace(fused, x, check_trace=False)
    fused(x).sum().backward()
    assert not cudnn
    assert all(parameter.grad is not None for parameter in fused.parameters())
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, deterministic=True):
        fused(x)
    assert not cudnn


def test_another_thread_is_not_told_how(cudnn: list[str]) -> None:
    made: list[Tensor] = []
    x, weight, bias = IMAGES, torch.ones(2, 3, 3, 3), torch.ones(2)
    with Computing(lambda *given: torch.zeros(())):
        other = threading.Thread(target=lambda: made.append(convolve_relu(x, weight, bias)))
        other.start()
        other.join()
        assert convolve_relu(x, weight, bias).shape == ()
        with Computing(usual):
            assert convolve_relu(x, weight, bias).dim() == 4
        assert convolve_relu(x, weight, bias).shape == ()
    assert torch.equal(made[0], convolve_relu(x, weight, bias))
    fused = replearn.fast.streamline(
        net(lambda x, c: torch.relu(c(x)), nn.Conv2d(3, 4, 3)), x, flatten=True, fuse=True
    )
    with Computing(lambda *given: pytest.fail("what is around must not matter")):
        fused(x)


class Wrong:
    """What cuDNN could do to a result."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change, self.asked = change, 0

    def __call__(self, *given: Any) -> Tensor:
        self.asked += 1
        return self.change(usual(*given))


def refuse(made: Tensor) -> Tensor:
    raise RuntimeError("FIND was unable to find an engine\nand more")


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a number": (lambda made: made.index_fill(1, torch.tensor(1), 3e3), "off by"),
    "NaN": (lambda made: made.index_fill(1, torch.tensor(1), torch.nan), "off by nan"),
    "a hundredth": (lambda made: made * 1.01, "off by"),
    "a shape": (lambda made: made[:, :1], "it gives"),
    "an error": (refuse, "unable to find an engine"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_in_a_trial_is_told_and_left_to_torch(
    name: str, cudnn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, says = WRONG[name]
    wrong, x = Wrong(change), torch.randn(2, 3, 32, 32)
    plain = replearn.deploy(resnet(), x, flatten=True)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    for module in (convolving, trusting):
        monkeypatch.setattr(module, "at_once", wrong)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=says):
            first = fused(x)
        assert wrong.asked == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close((first, fused(x)), (plain(x), plain(x)), rtol=1e-5, atol=1e-5)
    assert wrong.asked == 1
    assert fused.num_kinds == 0


def test_a_trial_without_memory_for_it_is_no_failure_of_the_model(
    cudnn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    x = torch.randn(2, 3, 32, 32)
    plain = replearn.deploy(resnet(), x, flatten=True)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    with torch.no_grad():
        with monkeypatch.context() as without:
            without.setattr(convolving, "at_once", at_once)
            torch.testing.assert_close(fused(x), plain(x), rtol=1e-5, atol=1e-5)
        assert fused.num_kinds == 0
        fused(x)
    assert fused.num_kinds == 1


UNSAID = {"NaN": torch.nan, "inf": torch.inf}


@pytest.mark.parametrize("name", UNSAID)
def test_inputs_that_are_no_numbers_decide_nothing(name: str, cudnn: list[str]) -> None:
    x = torch.randn(2, 3, 32, 32)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    broken = x.clone()
    broken[0, 0, 0, 0] = UNSAID[name]
    with torch.no_grad():
        assert not fused(broken)[0].isfinite().all()
        assert fused.num_kinds == 0
        fused(x)
    assert fused.num_kinds == 1


def test_what_can_never_be_compared_is_given_up(cudnn: list[str]) -> None:
    x = torch.full((2, 3, 32, 32), torch.nan)
    fused = replearn.deploy(resnet(), torch.randn(2, 3, 32, 32), flatten=True, fuse=True)
    with torch.no_grad():
        for _ in range(trusting.TRIALS - 1):
            fused(x)
        with pytest.warns(UserWarning, match="inf or NaN"):
            fused(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fused(x)
    assert fused.num_kinds == 0
    assert not cudnn


def test_an_empty_batch_is_torchs(cudnn: list[str]) -> None:
    fused = replearn.deploy(resnet(), torch.randn(2, 3, 32, 32), flatten=True, fuse=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(trusting.TRIALS + 1):
            assert fused(torch.empty(0, 3, 32, 32)).shape == (0, 10)
    assert not cudnn


def test_zeros_decide_nothing(cudnn: list[str]) -> None:
    model = net(lambda x, conv: torch.relu(conv(x)), nn.Conv2d(3, 4, 3, bias=False))
    fused = replearn.fast.streamline(model, IMAGES, flatten=True, fuse=True)
    with torch.no_grad():
        fused(torch.zeros_like(IMAGES))
        assert fused.num_kinds == 0
        fused(IMAGES)
    assert fused.num_kinds == 1


def test_a_trial_holds_for_its_switches_alone(cudnn: list[str]) -> None:
    x = torch.randn(2, 3, 32, 32)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    with torch.no_grad():
        fused(x)
        with torch.backends.cudnn.flags(enabled=True, benchmark=not torch.backends.cudnn.benchmark):
            fused(x)
        assert fused.num_kinds == 2
        with replearn.fast.verify.exact():
            fused(x)
        assert fused.num_kinds == 3
        fused(x.contiguous(memory_format=LAST))
    assert fused.num_kinds == 4


def test_other_weights_are_tried_anew_and_a_copy_tries_itself(cudnn: list[str]) -> None:
    x = torch.randn(2, 3, 32, 32)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    with torch.no_grad():
        expected = fused(x)
        stored = io.BytesIO()
        torch.save(fused, stored)
        stored.seek(0)
        for again in (copy.deepcopy(fused), torch.load(stored, weights_only=False)):
            assert again.num_kinds == 0
            assert num_calls(again.model, convolve_relu) == num_joined(fused.model)
            assert torch.equal(again(x), expected)
            assert again.num_kinds == 1
            assert torch.equal(again(x), expected)
        fused.load_state_dict(fused.state_dict(), assign=True)
        assert fused.num_kinds == 0
        fused(x)
        fused.double()
        assert fused.num_kinds == 0
        torch.testing.assert_close(fused(x.double()).float(), expected, rtol=1e-4, atol=1e-4)


def test_where_nothing_can_be_joined_there_is_nothing_to_try(cudnn: list[str]) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU()).eval(), torch.randn(2, 3, 8, 8)
    assert not any(
        isinstance(m, Fused) for m in replearn.fast.streamline(model, x, flatten=True, fuse=True).modules()
    )


def test_images_in_float32_are_cast_as_autocast_would(cudnn: list[str]) -> None:
    x = torch.randn(2, 3, 32, 32)
    plain = replearn.deploy(resnet(), x, flatten=True, graph=False, dtype=torch.bfloat16)
    fused = replearn.deploy(resnet(), x, flatten=True, graph=False, dtype=torch.bfloat16, fuse=True)
    (inner,) = [module for module in fused.modules() if isinstance(module, Fused)]
    weights = [p for p in inner.parameters() if p.dim() == 4]
    assert all(weight.dtype is torch.bfloat16 for weight in weights)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(fused(x), plain(x), rtol=0.05, atol=0.05)
    assert inner.num_kinds == 1


def test_it_can_be_traced_as_a_part_of_something_else(cudnn: list[str]) -> None:
    x = torch.randn(2, 3, 32, 32)
    model = nn.Sequential(replearn.deploy(resnet(), x, flatten=True, fuse=True), nn.Linear(10, 2)).eval()
    flat = flatten(model, x)
    torch.testing.assert_close(flat(x), model(x))


@pytest.mark.parametrize("file", ["model.pt2", "model.onnx", "model.safetensors"])
def test_it_is_a_way_to_run_and_not_to_store(file: str, cudnn: list[str], tmp_path: Any) -> None:
    from replearn.deployment.exporting import export
    from replearn.deployment.quantizing.readiness import check_quantizable

    x = torch.randn(2, 3, 32, 32)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    with pytest.raises(ReplearnError, match="Export what deploy gives without fuse"):
        export(fused, tmp_path / file, x)
    with pytest.raises(ReplearnError, match="fuse=True can't be quantized"):
        check_quantizable(fused)


def test_the_bench_says_that_it_needs_flat_graphs(cudnn: list[str]) -> None:
    from replearn.experiments.bench.inference_sides import E2E, make_sides

    sides = make_sides("cifar_resnet:20:16", 32, torch.device("cpu"), 2)
    with pytest.raises(ReplearnError, match="leave --no-flatten out"):
        sides.built("amp+fuse", (E2E,), torch.randn(1, 3, 32, 32), flatten=False)


def test_it_is_not_kept_for_ever(cudnn: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusting, "MOST", 2)
    x = torch.randn(4, 3, 32, 32)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    with torch.no_grad():
        for size in (1, 2, 3):
            fused(x[:size])
    assert fused.num_kinds == 1


class Scaled(nn.Module):
    """A model that takes more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        return torch.relu(self.conv(x)) * (1 if scale is None else scale)


def test_inputs_of_any_kind_are_taken(cudnn: list[str]) -> None:
    model = Scaled().eval()
    for scale in (torch.full((), 3.0), 2, {1}):
        given = {"x": IMAGES} | ({} if isinstance(scale, set) else {"scale": scale})
        fused = replearn.fast.streamline(model, given, flatten=True, fuse=True)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(fused(**given), model(**given))
        assert fused.num_kinds == 1
    with torch.no_grad():
        assert fused._kind((IMAGES, {1}), {}) is None  # no plain value, which calls could be told apart by


def test_what_a_trial_says_of_sums_that_spread_and_other_dtypes() -> None:
    x, weight, bias = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 1, 1), torch.randn(5)
    for given, says in (
        ((x, weight, bias, torch.randn(5, 1, 1)), "spreads"),
        ((x, weight, bias, torch.randn(2, 5, 4, 4).double()), "its weight is in torch.float32"),
    ):
        trial = Trial()
        assert torch.equal(trial(*given, (1, 1), (0, 0), (1, 1)), usual(*given, (1, 1), (0, 0), (1, 1)))
        assert says in str(trial.failure)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"fuse": 1}, "write True"),
        ({"fuse": True}, "needs flatten=True"),
        ({"fuse": True, "flatten": True, "compile": True}, "Leave one of them out"),
        ({"fuse": True, "flatten": True}, "needs a model on a CUDA GPU"),
    ],
)
@pytest.mark.parametrize("replaced", [True, False])
def test_where_it_can_not_work_it_says_so(how: dict[str, Any], says: str, replaced: bool) -> None:
    door = replearn.deploy if replaced else replearn.fast.streamline
    model = resnet() if replaced else replearn.models.resnet32().eval()
    with pytest.raises(ReplearnError, match=says):
        door(model, torch.randn(2, 3, 32, 32), **how)  # type: ignore[operator]


def test_float32_is_ordered_too_where_it_is_fused(monkeypatch: pytest.MonkeyPatch, cudnn: list[str]) -> None:
    from replearn.fast import inference as streamlining

    for module in (ordering, streamlining):
        monkeypatch.setattr(module, "orders_by_channel", lambda device: True)
    x = torch.randn(2, 3, 32, 32)
    fused = replearn.deploy(resnet(), x, flatten=True, fuse=True)
    plain = replearn.deploy(resnet(), x, flatten=True)
    for model, last in ((fused, True), (plain, False)):
        weights = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
        assert weights
        assert all(weight.is_contiguous(memory_format=LAST) is last for weight in weights)


def trusted(build: Callable[..., nn.Module], x: Tensor, dtype: torch.dtype | None, **graph: bool) -> Fused:
    """What cuDNN computes in a fused model: as the plain one does, whatever lies in the memory that it takes."""
    plain = build(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused = build(dtype=dtype, fuse=True, **graph)
        with torch.inference_mode():
            expected = plain(x).float()
            within = {None: 2e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype] * expected.abs().max()
            for _ in range(3):
                assert (fused(x).float() - expected).abs().max() <= within
                rubbish = [torch.full((8, 64, 24, 24), torch.nan, device="cuda", dtype=dtype) for _ in range(20)]
                del rubbish
    (inner,) = [module for module in fused.modules() if isinstance(module, Fused)]
    assert inner.num_kinds == 1
    return inner


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["resnet34", "resnet50"])
def test_cudnn_gives_what_torch_does(name: str, graph: bool, dtype: torch.dtype | None) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)().cuda()
    model.train()(torch.randn(16, 3, 96, 96, device="cuda"))
    model.eval()
    x = torch.randn(8, 3, 96, 96, device="cuda")
    inner = trusted(partial(replearn.fast.streamline, model, x, flatten=True), x, dtype, graph=graph)
    assert num_joined(inner.model) == {"resnet34": 32, "resnet50": 48}[name]


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_network_without_a_stem_is_trusted_too(batch: int, dtype: torch.dtype | None) -> None:
    model, x = resnet().cuda(), torch.randn(batch, 3, 32, 32, device="cuda")
    trusted(partial(replearn.deploy, model, x, flatten=True, merge=True), x, dtype)


@pytest.mark.cuda
@needs_gpu
def test_in_full_float32_it_is_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 14, 14, device="cuda").contiguous(memory_format=LAST)
    weight, bias = torch.randn(64, 64, 3, 3, device="cuda") / 24, torch.randn(64, device="cuda")
    given = x, weight, bias, x, (1, 1), (1, 1), (1, 1)
    exact = usual(*(t.double() if isinstance(t, Tensor) else t for t in given))  # type: ignore[arg-type]
    with replearn.fast.verify.exact(), torch.no_grad():
        assert float((convolving.at_once(*given) - exact).abs().max()) < 1e-4


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("summed", [False, True])
def test_what_is_no_number_stays_none(dtype: torch.dtype, summed: bool) -> None:
    torch.manual_seed(0)
    for channels in (64, 128, 512):
        x = torch.randn(4, channels, 14, 14, device="cuda", dtype=dtype).contiguous(memory_format=LAST)
        weight = torch.randn(channels, channels, 3, 3, device="cuda", dtype=dtype).contiguous(memory_format=LAST)
        bias = torch.randn(channels, device="cuda", dtype=dtype)
        x[0, 0, 5, 5] = torch.nan
        given = x, weight, bias, torch.randn_like(x) if summed else None, (1, 1), (1, 1), (1, 1)
        with torch.no_grad():
            expected, found = usual(*given).isnan(), convolving.at_once(*given).isnan()
        assert expected.any()
        assert torch.equal(found, expected)
