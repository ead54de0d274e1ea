"""Convolutions of a flat graph in channels_last order: the same numbers, or the graph as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import HERE, runs_kernels
from torch import Tensor, nn
from zoo import ZOO, outputs

import replearn
from replearn.deployment.exporting import export
from replearn.fast.graph_module import FlatGraph
from replearn.fast.inlining import cast_weights_, flatten, note_values_
from replearn.fast.kernels.stem import stem
from replearn.fast.passes import channels_last as ordering
from replearn.fast.passes import stem as opening
from replearn.fast.passes._context import Context
from replearn.fast.passes.maxpool_relu import apply_ as pool_first_

LAST = torch.channels_last
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "on_cudnn", lambda flat: True)


def images(batch: int = 2, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


def kernels(model: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.dim() == 4}


def is_last(weight: Tensor) -> bool:
    """Also where one channel, or one place, makes both orders contiguous: torch goes by the strides."""
    return weight.stride() == torch.empty_like(weight, memory_format=LAST).stride()


def noted(model: nn.Module, x: Tensor, dtype: torch.dtype | None = torch.bfloat16) -> FlatGraph:
    flat = flatten(model.eval(), x)
    note_values_(flat, x, dtype)
    return flat


def near(one: Tensor, other: Tensor, share: float) -> bool:
    return float((one.float() - other.float()).abs().max()) <= share * float(other.abs().max())


def test_an_ordinary_resnet_is_ordered_and_its_model_is_not_touched() -> None:
    torch.manual_seed(0)
    model, x = replearn.models.CifarResNet(8, width=8).eval(), images()
    flat = noted(model, x)
    code, before = flat.code, outputs(flat, x)[0]
    ordering.apply_(flat, Context(dtype=torch.bfloat16))
    assert all(is_last(weight) for weight in kernels(flat).values())
    assert not any(is_last(weight) for weight in kernels(model).values())
    assert flat.code == code
    assert all(weight.requires_grad for weight in flat.parameters())
    for batch in (1, 2, 5):
        assert near(outputs(flat, images(batch))[0], outputs(model, images(batch))[0], 1e-5)
    assert outputs(flat, x)[0].stride() == before.stride()
    cast_weights_(flat, torch.bfloat16)
    assert all(is_last(weight) and weight.dtype is torch.bfloat16 for weight in kernels(flat).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cifar_resnet", "timm_resnet", "timm_resnet_d", "timm_seresnet"])
def test_both_doors_order_in_half_precision(name: str, dtype: torch.dtype) -> None:
    fresh, replaced, x = ZOO[name].fresh(), ZOO[name].replaced(), images()
    for form, plain in (
        (
            replearn.fast.streamline(fresh, x, flatten=True, graph=False, dtype=dtype),
            replearn.fast.streamline(fresh),
        ),
        (replearn.deploy(replaced, x, flatten=True, graph=False, dtype=dtype), replearn.deploy(replaced)),
        (
            replearn.deploy(replaced, x, flatten=True, merge=True, graph=False, dtype=dtype),
            replearn.deploy(replaced),
        ),
    ):
        assert len(kernels(form)) > 2
        assert all(is_last(weight) and weight.dtype is dtype for weight in kernels(form).values())
        assert near(outputs(form, x)[0], outputs(plain, x)[0], 0.1)
    for other in (fresh, replaced):
        assert not any(is_last(weight) for weight in kernels(other).values())


def test_in_float32_and_on_a_cpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ZOO["cifar_resnet"].fresh(), images()
    assert not any(map(is_last, kernels(replearn.fast.streamline(model, x, flatten=True)).values()))
    monkeypatch.undo()
    half = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.bfloat16)
    assert not any(map(is_last, kernels(half).values()))


def test_what_is_in_that_order_already_stays_as_it_is() -> None:
    model, x = ZOO["timm_resnet"].fresh(), images()
    options: dict[str, Any] = {"flatten": True, "dtype": torch.bfloat16}
    form = replearn.fast.streamline(model, x, **options)
    asked = replearn.fast.streamline(model, x, channels_last=True, **options)
    assert {n: w.stride() for n, w in kernels(form).items()} == {n: w.stride() for n, w in kernels(asked).items()}
    assert torch.equal(outputs(form, x)[0], outputs(asked, x)[0])


class Ways(nn.Module):
    """Two convolutions and a head, with something in between or after them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        groups = 4 if how == "groups" else 1
        self.how, self.one = how, nn.Conv2d(3, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 3, padding=1, groups=groups, bias=False)
        size = 64 if how in ROWS else 4
        self.head = nn.Linear(size, 5)
        self.pool: nn.Module = nn.MaxPool2d(2, 2)
        if how == "conv1d":
            self.other: nn.Module = nn.Conv1d(4, 4, 1)
        elif how == "conv3d":
            self.other = nn.Conv3d(1, 1, 1)
        elif how == "transposed":
            self.other = nn.ConvTranspose2d(4, 4, 3, padding=1)
            self.other.weight = self.two.weight
        elif how == "leaf":
            self.other = nn.PixelShuffle(1)
        elif how == "shared":
            self.other = nn.RMSNorm((4, 4, 3, 3))  # which stays a module in a flat graph
            self.other.weight = self.two.weight
        elif how == "one pixel, seen":
            self.other = nn.AdaptiveAvgPool2d(1)
        elif how == "buffer":
            kernel = self.two.weight.detach()
            del self.two.weight
            self.two.register_buffer("weight", kernel)

    def forward(self, x: Tensor) -> Any:
        how = self.how
        x = torch.relu(self.one(x))
        y = self.between(x)
        y = y if how == "single" else self.two(y)
        if how in AFTER:
            return self.after(y)
        y = self.pool(y.add_(1))
        if how in ROWS:
            return self.rows(y)
        if how == "one pixel, seen":
            return self.head(self.other(y).view(y.size(0), -1))
        return self.head(y.mean((2, 3)))

    def between(self, x: Tensor) -> Tensor:
        how = self.how
        if how == "view":
            return x.view(x.shape[0], 2, 2, x.shape[2], x.shape[3]).sum(2).repeat(1, 2, 1, 1)
        if how == "as_strided":
            return torch.as_strided(x, (2, 4, 16, 16), (1024, 256, 16, 1))
        if how == "stride":
            return x * x.stride(1)
        if how == "is_contiguous":
            return x * x.is_contiguous()
        if how == "data_ptr":
            return x + 0 * (x.data_ptr() % 2)
        if how == "resize":
            return x.resize_(2, 4, 16, 16)
        if how == "set":
            return torch.empty_like(x).set_(x)
        if how == "custom":
            return told_apart(x)
        if how in ("leaf", "transposed"):
            return self.other(x)
        if how == "shared":
            return x + self.other(torch.ones(4, 4, 3, 3, device=x.device)).mean()
        if how == "conv1d":
            return x * self.other(torch.ones(1, 4, 1, device=x.device)).unsqueeze(-1)
        if how == "conv3d":
            return x * self.other(torch.ones(1, 1, 1, 1, 1, device=x.device)).sum()
        if how == "weight seen":
            return x + self.two.weight.sum()
        if how == "weight computed":
            return F.conv2d(x, self.two.weight * 2, padding=1)
        if how == "convolved weight":
            return x + F.conv2d(self.two.weight, self.two.weight).mean()
        if how == "unknown mean":
            return x * x.mean((1, 2), keepdim=True)
        return x

    def after(self, y: Tensor) -> Any:
        how = self.how
        if how == "map":
            return y
        if how == "map and classes":
            return {"map": y, "classes": self.head(y.mean((2, 3)))}
        if how == "tokens":
            return y.flatten(2).transpose(1, 2)
        if how == "contiguous map":
            return y.contiguous()
        return torch.flatten(y, 1)

    def rows(self, y: Tensor) -> Tensor:
        how = self.how
        y = F.avg_pool2d(y, 2)
        if how == "view at the end":
            return self.head(y.view(y.shape[0], -1))
        if how == "reshaped":
            return self.head(y.reshape(y.shape[0], -1))
        if how == "contiguous":
            return self.head(y.contiguous().view(y.shape[0], -1))
        row = torch.flatten(y, 1)
        if how == "row written":
            row.mul_(2)
            return self.head(row) + y.mean()
        if how == "map written":
            y.mul_(2)
        if how == "seen in a row":
            row = torch.sigmoid(row) * row
        return self.head(row)


AFTER = ("map", "map and classes", "tokens", "contiguous map", "row")
ROWS = ("flat", "view at the end", "reshaped", "contiguous", "row written", "map written", "seen in a row")
ORDERED = ("plain", "one pixel, seen", "contiguous map", "row", "flat", "reshaped", "contiguous", "seen in a row")
LEFT = (
    *("view", "as_strided", "stride", "is_contiguous", "data_ptr", "resize", "set", "custom", "leaf", "shared"),
    *("map", "map and classes", "tokens", "view at the end", "row written", "map written", "unknown mean"),
    *("groups", "single", "conv1d", "conv3d", "transposed", "weight seen", "weight computed", "convolved weight"),
    "buffer",
)


@torch.fx.wrap
def told_apart(x: Tensor) -> Tensor:
    return x * (1 if x.is_contiguous() else 2)


@pytest.mark.parametrize("how", ORDERED)
def test_ways_that_know_values_by_their_numbers_alone(how: str) -> None:
    torch.manual_seed(0)
    model, x = Ways(how).eval(), images()
    flat = noted(model, x)
    ordering.apply_(flat, Context(dtype=torch.bfloat16))
    assert len(kernels(flat)) == 2
    assert all(map(is_last, kernels(flat).values()))
    for batch in (1, 2, 3):
        one, other = outputs(flat, images(batch))[0], outputs(model, images(batch))[0]
        assert near(one, other, 1e-5)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("how", LEFT)
def test_ways_that_stay(how: str) -> None:
    torch.manual_seed(0)
    model, x = Ways(how).eval(), images()
    flat = noted(model, x)
    held, code = dict(flat.state_dict(keep_vars=True)), flat.code
    ordering.apply_(flat, Context(dtype=torch.bfloat16))
    assert flat.code == code
    now = flat.state_dict(keep_vars=True)
    assert all(now[name] is tensor for name, tensor in held.items())
    assert not any(map(is_last, kernels(flat).values()))
    for one, other in zip(outputs(flat, x), outputs(model, x), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_graphs_in_full_precision_stay() -> None:
    x = images()
    for model, given, dtype in (
        (Ways("plain"), x, None),
        (Ways("plain").double(), x.double(), torch.bfloat16),  # which autocast leaves alone
        (Ways("row"), x[0], torch.bfloat16),  # without a batch
    ):
        flat = noted(model, given, dtype)
        ordering.apply_(flat, Context(dtype=torch.bfloat16))
        assert not any(map(is_last, kernels(flat).values()))


class Grey(nn.Module):
    """A stem of images with one or three colours, and one more convolution."""

    def __init__(self, colours: int) -> None:
        super().__init__()
        self.conv, self.more = nn.Conv2d(colours, 16, 3, 2, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.more(self.pool(torch.relu(self.conv(x)))).mean((2, 3)))
        return made


@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_stem_is_told_the_order(colours: int, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Grey(colours).eval(), torch.randn(2, colours, 20, 24)
    flat = flatten(model, x)
    pool_first_(flat, Context())
    note_values_(flat, x, torch.bfloat16)
    if ordered:
        ordering.apply_(flat, Context(dtype=torch.bfloat16))
    monkeypatch.setattr(opening, "has_triton", lambda flat: True)
    opening.apply_(flat, Context())
    (node,) = flat.graph.find_nodes(op="call_function", target=stem)
    assert node.args[4] is ordered
    note_values_(flat, x, torch.bfloat16)
    assert is_last(node.meta["value"]) is ordered  # as torch computes it
    assert near(outputs(flat, x)[0], outputs(model, x)[0], 1e-5)


@runs_kernels
@torch.no_grad()
def test_the_stems_kernels_write_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "on_cudnn", lambda flat: True)
    monkeypatch.setattr(opening, "MIN_PIXELS_EAGER", 1)
    torch.manual_seed(0)
    model, x = Grey(3).eval().to(HERE), torch.randn(2, 3, 20, 24, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16)
    (node,) = form.model.graph.find_nodes(op="call_function", target=stem)
    assert node.args[4] is True
    with torch.autocast(HERE, torch.float16):
        made = stem(x, form.model.conv_weight, form.model.conv_weight_bias, *node.args[3:])
    assert is_last(made)
    assert near(form(x), model(x), 2e-2)


def test_it_copies_pickles_and_compiles() -> None:
    model, x = ZOO["timm_resnet"].replaced(), images()
    form: Any = replearn.deploy(model, x, merge=True, flatten=True, graph=False, dtype=torch.bfloat16)
    expected = outputs(form, x)[0]
    for other in (copy.deepcopy(form), pickle.loads(pickle.dumps(form))):
        assert all(map(is_last, kernels(other).values()))
        assert torch.equal(outputs(other, x)[0], expected)
    torch.compiler.reset()
    fast = torch.compile(form, fullgraph=True, backend="aot_eager")
    assert near(outputs(fast, x)[0], expected, 5e-2)


@pytest.mark.parametrize("to", ["pt2", "onnx"])
def test_it_is_exported(to: str, tmp_path: Any) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    model, x = ZOO["timm_resnet"].replaced(), images()
    flat: Any = replearn.deploy(model, x, merge=True, flatten=True)
    note_values_(flat, x, torch.bfloat16)
    ordering.apply_(flat, Context(dtype=torch.bfloat16))
    assert all(map(is_last, kernels(flat).values()))
    assert export(flat, tmp_path / f"model.{to}", x).batch_sizes == (1, 3)


@needs_gpu
@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu_a_resnet_needs_no_copies(
    dtype: torch.dtype, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = ZOO["timm_resnet"].replaced().cuda()
    x = torch.randn(8, 3, 64, 64, device="cuda")
    options: dict[str, Any] = {"flatten": True, "merge": True, "dtype": dtype, "graph": graph}
    form = replearn.deploy(model, x, **options)
    assert all(is_last(weight) and weight.dtype is dtype for weight in kernels(form).values())
    monkeypatch.setattr(ordering, "on_cudnn", lambda flat: False)
    before = replearn.deploy(model, x, **options)
    assert not any(is_last(weight) for weight in kernels(before).values())
    for given in (x, x[:1], x.contiguous(memory_format=LAST)):
        one, other = form(given), before(given)
        assert one.stride() == other.stride()
        assert near(one, other, {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype])
        assert near(one, model(given), {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype])
