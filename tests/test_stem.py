"""A ResNet's stem in kernels of our own, against torch's own operations."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from interpreting import HERE, interpret, runs_kernels
from test_narrow_convolutions import distance, needs_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import replearn
from replearn.costs.precision import float32_products, noting_switches
from replearn.experiments.bench.inference_counts import count
from replearn.fast import inference as streamlining
from replearn.fast.graphs import repeating
from replearn.fast.kernels import stem as operation
from replearn.fast.kernels.stem import stem
from replearn.fast.passes import maxpool_relu as pooling
from replearn.fast.passes import stem as opening

SIZES = (2, 3, 3, 2, 1)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "MANY", 1)
    monkeypatch.setattr(repeating, "_runs", {})  # tests choose other tiles than the last one did


def layers(
    colours: int = 3,
    side: int = 7,
    channels: int = 64,
    size: tuple[int, int] = (18, 22),
    dtype: Any = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    images = torch.randn(2, colours, *size, device=HERE)
    weight = (torch.randn(channels, colours, side, side, device=HERE) / side).to(dtype)
    return images, weight, torch.randn(channels, 1, 1, device=HERE)


def let_walk(walked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few images there are; in the interpreter, which is slow, not far."""
    monkeypatch.setattr(operation, "LEAST", 1 if walked else 2**31)
    if HERE == "cpu":
        monkeypatch.setattr(operation, "WALKING", replace(operation.WALKING, steps=2))


def exactly(images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...]) -> Tensor:
    given = images.to(weight.dtype).double(), weight.double(), bias.double()
    return operation.usual(*given, sizes, False)


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("colours", "side", "channels", "size", "sizes", "walked"),
    [
        (3, 7, 64, (18, 22), SIZES, False),
        (3, 7, 64, (18, 22), SIZES, True),
        (3, 3, 128, (12, 13), (2, 1, 3, 2, 1), True),
        (1, 5, 16, (9, 9), (1, 2, 2, 2, 0), True),  # where one can't walk
        (4, 4, 48, (17, 16), (3, 0, 3, 3, 1), False),
        (2, 9, 32, (12, 7), (2, 4, 3, 2, 1), False),
        (2, 9, 32, (12, 7), (1, 4, 3, 2, 1), True),
        (3, 7, 16, (7, 277), SIZES, True),  # two walk side by side
    ],
)
def test_a_stem_is_that_of_exact_arithmetic(
    colours: int,
    side: int,
    channels: int,
    size: tuple[int, int],
    sizes: tuple[int, ...],
    walked: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_walk(walked, monkeypatch)
    images, weight, bias = layers(colours, side, channels, size, dtype)
    exact = exactly(images, weight, bias, sizes)
    for last in (False, True):
        for given in (images, images.contiguous(memory_format=torch.channels_last), images[:1]):
            with torch.autocast(HERE, torch.float16, enabled=dtype is torch.float16):
                assert operation.fits(given, weight, bias, sizes, last, 1)
                found = stem(given, weight, bias, sizes, last, 1)
            assert found.dtype is dtype
            assert found.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
            assert distance(found, exact[: len(given)]) < 4e-4  # float32 is rounded to TF32


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
@pytest.mark.parametrize("column", [8, 9, 10, 11])  # even ones lie where a window's line is filled up
@pytest.mark.parametrize("walked", [False, True])
def test_what_is_no_number_stays_where_it_is(
    walked: bool, column: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_walk(walked, monkeypatch)
    images, weight, bias = layers()
    images[0, 1, 9, column] = bad
    with torch.autocast(HERE, torch.float16):
        found = stem(images, weight, bias, SIZES, False, 1)
        usual = operation.usual(images, weight, bias, SIZES, False)
    assert not usual.isfinite().all()
    assert torch.equal(found.isnan(), usual.isnan())
    assert torch.equal(found.isinf(), usual.isinf())


@runs_kernels
@pytest.mark.parametrize(
    "change",
    [
        "gradient",
        "no autocast",
        "expanded",
        "colours",
        "double",
        "few",
        "empty",
        "far apart",
        "one bias",
        "window",
    ],
)
def test_the_kernels_are_not_given_what_they_would_misread(change: str) -> None:
    images, weight, bias = layers()
    with FakeTensorMode():
        far = torch.empty(2 * 2**21 + 1, 3, 18, 22, device=HERE)[:: 2**21]
    given = {
        "gradient": lambda: (images, weight.requires_grad_()),
        "expanded": lambda: (images[:1].expand(2, -1, -1, -1), weight),
        "colours": lambda: (images[:, :1], weight),
        "double": lambda: (images.double(), weight),
        "empty": lambda: (images[:0], weight),
        "far apart": lambda: (far, weight),
    }.get(change, lambda: (images, weight))()
    bias = bias[:1] if change == "one bias" else bias
    sizes = (2, 3, 9, 2, 1) if change == "window" else SIZES
    with torch.autocast(HERE, torch.float16, enabled=change != "no autocast"):
        assert not operation.fits(*given, bias, sizes, False, 1000 if change == "few" else 1)


@runs_kernels
@torch.no_grad()
def test_float32_is_rounded_only_where_its_convolutions_are() -> None:
    images, weight, bias = layers(dtype=torch.float32)
    launched: list[str] = []
    for tf32 in (True, False):
        with float32_products(tf32=tf32), torch.profiler.profile() as profiled:
            found = stem(images, weight, bias, SIZES, True, 1)
            compiled = torch.ops.replearn.stem(images, weight, bias, SIZES, True)
        launched.append("in torch" if any(e.name == "aten::conv2d" for e in profiled.events()) else "in kernels")
        assert distance(found, exactly(images, weight, bias, SIZES)) < 1e-3
        assert compiled.is_contiguous(memory_format=torch.channels_last)
        assert distance(compiled, found) < 1e-3
    assert launched == ["in kernels", "in torch"]


class Small(nn.Module):
    """A stem as torchvision and timm write it, and a head."""

    def __init__(self, pool: nn.Module | None = None, **conv: Any) -> None:
        super().__init__()
        setting: dict[str, Any] = {"kernel_size": 7, "stride": 2, "padding": 3, "bias": False} | conv
        self.conv1 = nn.Conv2d(3, 32, **setting)
        self.bn1 = nn.BatchNorm2d(32)
        self.maxpool = pool or nn.MaxPool2d(3, 2, 1)
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(y.mean((2, 3)))


def small(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Small(**changes)
    model(torch.randn(8, 3, 20, 20))
    return model.to(HERE).eval()


def stems(form: Any) -> int:
    flat = form.model if hasattr(form, "model") else form
    return sum(node.target is stem for node in flat.graph.nodes)


@runs_kernels
@pytest.mark.parametrize(
    ("apart", "dtype", "last"),
    [(False, None, True), (True, None, False), (False, torch.float16, False), (True, torch.float16, True)],
)
def test_a_network_begins_with_one_operation(
    apart: bool, dtype: torch.dtype | None, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pooling, "launches_biases", lambda device: apart
    )  # on a GPU they are launches of their own
    model, x = small(), torch.randn(2, 3, 20, 24, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=dtype, channels_last=last)
    held = form.model if dtype is not None else form
    called = [node.target for node in held.graph.nodes if node.op.startswith("call")]
    assert called == [stem, "mean", nn.functional.linear]  # and nothing is left of what it stands for
    with torch.no_grad():
        exact = model(x)
        for given in (x, x[:1], x.contiguous(memory_format=torch.channels_last)):
            assert distance(form(given).float(), exact[: len(given)]) < 5e-3
        again = pickle.loads(pickle.dumps(copy.deepcopy(form)))
        assert torch.equal(again(x), form(x))
    form(x).float().sum().backward()
    model(x).sum().backward()
    assert distance(held.conv1_weight_bias.grad.flatten().float(), model.bn1.bias.grad) < 5e-3
    assert held.conv1_weight.dtype is (dtype or torch.float32)
    plain = replearn.fast.streamline(model, x)  # its layers as they are
    assert count(form, x).flops == count(plain, x).flops
    with torch.no_grad():
        program = torch.export.export(held, (x,))  # which is to run without this package
    assert not any("replearn" in str(node.target) for node in program.graph.nodes)


@runs_kernels
@pytest.mark.parametrize(
    "changes",
    [
        {"pool": nn.MaxPool2d(3, 2, 1, ceil_mode=True)}, {"pool": nn.MaxPool2d((3, 2), 2, 1)},
        {"pool": nn.AvgPool2d(3, 2, 1)}, {"kernel_size": 17, "padding": 8}, {"padding": "same", "stride": 1},
        {"stride": (2, 1)}, {"dilation": 2, "padding": 6}, {"pool": nn.MaxPool2d(5, 2, 1)},
    ],
    ids=["ceil", "oblong", "average", "large", "same", "two strides", "dilation", "wide"],
)  # fmt: skip
def test_another_stem_stays(changes: dict[str, Any]) -> None:
    model, x = small(**changes), torch.randn(2, 3, 20, 24, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16)
    assert stems(form) == 0
    with torch.no_grad():
        assert distance(form(x).float(), model(x)) < 5e-3


class Written(nn.Module):
    """Layers that almost are a stem, as a model's own code may write them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv = how, nn.Conv2d(3, 16, 3, 1, 1, bias=how == "two biases")
        shapes = {"one number": (1,), "along a line": (16,)}
        self.shift = nn.Parameter(torch.randn(shapes.get(how, (16, 1, 1))))

    def forward(self, x: Tensor) -> Tensor:
        x = x - 0.5
        y = nn.functional.max_pool2d(self.conv(x), 2, 2)
        if self.how == "written":
            x.mul_(2)
        if self.how == "twice":
            y = y.add_(self.shift, alpha=2)
        elif self.how == "by name":
            y = y.add_(other=self.shift)
        else:
            y = y.add_(self.shift)
        y = torch.relu_(input=y) if self.how == "by name" else torch.relu_(y)
        return y + self.shift if self.how == "read twice" else y.add(x.mean())


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize(
    ("how", "count"),
    [("plain", 1), ("written", 1), ("two biases", 0), ("twice", 0), ("one number", 0), ("along a line", 0),
     ("by name", 0), ("read twice", 0)],
)  # fmt: skip
def test_a_models_own_code_is_read_as_it_is(how: str, count: int) -> None:
    torch.manual_seed(0)
    model, x = Written(how).to(HERE).eval(), torch.randn(2, 3, 32, 32, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True)
    assert stems(form) == count
    assert distance(form(x), model(x)) < 1e-3


@runs_kernels
@pytest.mark.filterwarnings("ignore")
def test_derivatives_of_compiled_code_and_traces_are_torchs() -> None:
    images, weight, bias = layers(size=(20, 24), channels=16, dtype=torch.float32)

    def total(compute: Any, *given: Tensor) -> Tensor:
        return (compute(*given, SIZES, False) ** 2).sum()

    def slopes(*given: Tensor) -> Any:
        return torch.func.grad(lambda *leaves: total(lambda *a: stem(*a, 1), *leaves), (0, 1, 2))(*given)

    torch._dynamo.reset()
    found = torch.compile(slopes, backend="aot_eager")(images, weight, bias)
    exact = torch.func.grad(lambda *leaves: total(operation.usual, *leaves), (0, 1, 2))(images, weight, bias)
    for one, other in zip(found, exact, strict=True):
        assert distance(one, other) < 2e-3
    _, slope = torch.func.jvp(lambda x: operation.usual(x, weight, bias, SIZES, False), (images,), (images,))
    dual = torch.compile(lambda *given: stem(*given, SIZES, False, 1), backend="aot_eager")
    with torch.no_grad(), forward_ad.dual_level():
        made = dual(forward_ad.make_dual(images, images), weight, bias)
        assert distance(forward_ad.unpack_dual(made).tangent, slope) < 1e-3
    traced = torch.jit.trace(lambda x: stem(x, weight, bias, SIZES, False, 1), (images,))
    with float32_products(tf32=False):
        assert torch.equal(traced(images), operation.usual(images, weight, bias, SIZES, False))


@runs_kernels
@torch.no_grad()
def test_a_weight_that_changes_is_followed() -> None:
    model, x = small(), torch.randn(2, 3, 20, 24, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True)
    before = stem(x, form.conv1_weight, form.conv1_weight_bias, SIZES, False, 1)
    form.conv1_weight.mul_(2)
    form.conv1_weight_bias.mul_(2)
    assert torch.equal(stem(x, form.conv1_weight, form.conv1_weight_bias, SIZES, False, 1), 2 * before)


class Traced:
    """A compiler that notes what it is given, and computes nothing."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        called = " ".join(str(node.target) for node in graph.graph.nodes)
        self.graphs += [name for name in ("launched", "replearn.stem", "conv2d") if name in called]
        return lambda *given: (torch.zeros(()),)


@torch.library.custom_op("replearn_tests::launched", mutates_args=())
def launched(images: Tensor) -> Tensor:
    return images.clone()


@launched.register_fake
def _(images: Tensor) -> Tensor:
    return torch.empty_like(images)


@pytest.fixture
def traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if our kernels ran here, and a compiler could trace them."""
    for name in ("can_be_traced", "fits"):
        monkeypatch.setattr(operation, name, lambda *given: True)
    monkeypatch.setattr(operation, "launched", lambda images, *others: launched(images))
    torch._dynamo.reset()


@contextmanager
def switched(precision: str, enabled: bool = True) -> Iterator[None]:
    """The switch of convolutions alone: compilers notice others."""
    conv, before = torch.backends.cudnn.conv, torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.enabled, conv.fp32_precision = enabled, precision
    try:
        yield
    finally:
        torch.backends.cudnn.enabled, conv.fp32_precision = True, before


@torch.no_grad()
@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("broken", [False, True])
def test_compiled_code_launches_kernels_where_tf32_is_noted(dtype: torch.dtype, broken: bool) -> None:
    images, weight, bias = layers(dtype=dtype)
    traced, alone = Traced(), Traced()

    def inner(*given: Tensor) -> Tensor:
        return stem(*given, SIZES, False)  # type: ignore[arg-type]

    def run(*given: Tensor) -> Tensor:
        if broken:
            torch._dynamo.graph_break()  # what comes then is compiled by itself, for whoever calls it
        return inner(*given)

    code = noting_switches(torch.compile(run, backend=traced, fullgraph=not broken))
    for precision in ("tf32", "ieee", "tf32", "ieee"):
        with switched(precision):
            code(images, weight, bias)
    with switched("tf32", enabled=False):
        code(images, weight, bias)
    half = dtype is torch.float16
    assert traced.graphs == (["launched"] if half else ["launched", "conv2d"])
    # who compiles it otherwise takes no note
    for other in (torch.compile(inner, backend=alone), torch.compile(code, backend=alone)):
        other(images, weight, bias)
    assert set(alone.graphs) == {"launched" if half else "replearn.stem"}


@torch.no_grad()
@pytest.mark.usefixtures("traceable")
def test_a_compiled_model_with_hooks_goes_by_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=traced))
    monkeypatch.setattr(streamlining, "unchecked", dict)
    monkeypatch.setattr(streamlining, "opens_with_kernels", lambda model: True)
    images, weight, bias = layers(dtype=torch.float32)
    model = Stem(weight, bias)
    model.register_forward_hook(lambda module, given, made: print(made.shape))
    streamlining.compile_(model)
    for precision in ("tf32", "ieee", "tf32"):
        with switched(precision):
            model(images)
    assert traced.graphs == ["launched", "conv2d"]


class Stem(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, images: Tensor) -> Tensor:
        return stem(images, self.weight, self.bias, SIZES, False)


@pytest.mark.cuda
@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("walked", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_compiled_model_launches_the_kernels_itself(
    dtype: torch.dtype | None, walked: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_walk(walked, monkeypatch)
    monkeypatch.setattr(opening, "FEW", 1)
    torch._dynamo.reset()
    model, x = small(), torch.randn(2, 3, 40, 44, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True, compile=True, dtype=dtype, channels_last=last)
    kernel = "convolve_and_pool_kernel" if walked else "pool_kernel"
    with float32_products(tf32=True):
        form(x)
        with torch.profiler.profile() as profiled:
            found = form(x)
        names = {event.name for event in profiled.events()}
        assert any(name.startswith(kernel) for name in names)
        assert not any("replearn" in name or "conv2d" in name for name in names)
        more = torch.randn(5, 3, 40, 44, device=HERE)  # a size that was not compiled for
        assert distance(form(more), model(more)) < 5e-3
    with switched("ieee"):
        expected, exact = model(x), form(x)
    assert distance(found, expected) < 5e-3
    assert distance(exact, expected) < (1e-5 if dtype is None else 5e-3)


@runs_kernels
def test_compiled_code_calls_it() -> None:
    model, x = small(), torch.randn(2, 3, 20, 24, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled: Any = torch.compile(form, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert distance(compiled(x), model(x)) < 1e-3
    assert any("replearn" in name for name in called)


def test_what_the_kernels_do_not_take_torch_computes() -> None:
    images, weight, bias = layers(dtype=torch.float32)
    leaf = bias.clone().requires_grad_()
    made = stem(images, weight, leaf, SIZES, False, 1)
    assert distance(made, exactly(images, weight, bias, SIZES)) < 1e-3
    made.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, (made > 0).sum((0, 2, 3)).view(-1, 1, 1).to(leaf.grad))


@needs_gpu
@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("last", [False, True])
def test_real_sizes_agree(dtype: torch.dtype, last: bool) -> None:
    images, weight, bias = layers(size=(224, 224), dtype=dtype)
    images = torch.randn(32, 3, 224, 224, device=HERE)
    with torch.autocast(HERE, dtype, enabled=dtype is not torch.float32):
        assert operation.fits(images, weight, bias, SIZES, last, 1)
        found = stem(images, weight, bias, SIZES, last, 1)
    allowed = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 4e-4}[dtype]
    assert distance(found, exactly(images, weight, bias, SIZES)) < allowed


def test_the_kernels_in_the_interpreter() -> None:
    interpret(
        __file__,
        "exact_arithmetic or no_number or misread or rounded or begins or stays or own_code or derivatives "
        "or followed or calls",
    )
