"""Pooling before bias and ReLU in a flat graph: the same bits, on fewer numbers, or the graph as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ZOO, outputs

import replearn
from replearn.experiments.bench.inference_counts import count
from replearn.fast.graph_module import FlatGraph
from replearn.fast.inference import Autocast
from replearn.fast.inlining import flatten
from replearn.fast.passes import maxpool_relu as pooling
from replearn.fast.passes import stem as stem_pass
from replearn.fast.passes._context import Context
from replearn.fast.passes.maxpool_relu import apply_

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases as on a GPU, where they are added after the convolution."""
    monkeypatch.setattr(pooling, "launches_biases", lambda device: True)


def flat_of(model: Any) -> Any:
    return model.model if isinstance(model, Autocast) else model


def stem_of(model: Any) -> list[str]:
    """What is computed up to the first pool and right after it."""
    flat = flat_of(model)
    kinds = []
    for node in flat.graph.nodes:
        if node.op == "call_module":
            kinds.append("pool" if isinstance(flat.get_submodule(node.target), nn.MaxPool2d) else "module")
        elif node.op in ("call_function", "call_method"):
            name = getattr(node.target, "__name__", str(node.target))
            kinds.append("pool" if "max_pool" in str(node) else name.rstrip("_"))
    end = kinds.index("pool") + 1
    while kinds[end : end + 1] in (["add"], ["relu"]):
        end += 1
    return kinds[:end]


def images(batch: int = 2, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_bias_that_is_added_apart_moves_too(dtype: torch.dtype | None) -> None:
    model, x = ZOO["timm_resnet"].replaced(), images()
    flat: Any = replearn.deploy(model, x, merge=True, flatten=True, graph=False, dtype=dtype)
    assert stem_of(flat) == ["conv2d", "pool", "add", "relu"]
    names = dict(flat_of(flat).named_parameters())
    assert "conv1_bias" not in names
    assert names["conv1_bias_pooled"].shape == (64, 1, 1)
    assert names["conv1_bias_pooled"].dtype == names["conv1_weight"].dtype == (dtype or torch.float32)
    plain = replearn.deploy(model, merge=True)
    assert_near(outputs(plain, x)[0], outputs(flat, x)[0], 1e-5 if dtype is None else 5e-2)


def assert_near(one: Tensor, other: Tensor, share: float) -> None:
    assert float((one.float() - other.float()).abs().max() / one.abs().max()) < share


class Stem(nn.Module):
    """The stem of a ResNet; `in_steps` adds the bias after the convolution, as a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.conv(x), inplace=True))  # type: ignore[no-any-return]

    def in_steps(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.conv.weight, padding=1)
        assert self.conv.bias is not None
        return self.pool(F.relu(y + self.conv.bias.to(y.dtype).view(-1, 1, 1)))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_moving_the_bias_is_exact(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    stem = Stem().eval()
    flat: Any = replearn.fast.streamline(stem, images(), flatten=True, graph=False, dtype=dtype)
    assert stem_of(flat) == ["conv2d", "pool", "add", "relu"]
    assert len(list(flat.parameters())) == 2
    for x in (images(1), images(2), images(5), images()[0]):  # the last without a batch
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            expected = stem.in_steps(x)
        assert expected.dtype is (dtype or torch.float32)
        assert torch.equal(flat(x), expected)
        assert flat(x).dtype is expected.dtype


@pytest.mark.usefixtures("apart")
@torch.no_grad()
def test_a_users_own_autocast_is_not_widened() -> None:
    torch.manual_seed(0)
    stem, x = Stem().eval(), images()
    flat = replearn.fast.streamline(stem, x, flatten=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert flat(x).dtype is torch.bfloat16
        assert_near(stem(x), flat(x), 2e-2)


@pytest.mark.usefixtures("apart")
@torch.no_grad()
def test_what_is_no_number_goes_through_alike() -> None:
    torch.manual_seed(0)
    stem, x = Stem().eval(), images()
    flat = replearn.fast.streamline(stem, x, flatten=True)
    x[0, 0, 3, 5], x[1, 1, 7, 7], x[1, 2, 0, 12] = float("nan"), float("inf"), -float("inf")
    expected = stem.in_steps(x)
    assert expected.isnan().any()
    assert not expected.isnan().all()
    assert torch.equal(flat(x).nan_to_num(-1.0, -2.0), expected.nan_to_num(-1.0, -2.0))


@pytest.mark.parametrize("moved", [False, True])
def test_it_learns_the_same(moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "launches_biases", lambda device: moved)
    torch.manual_seed(0)
    stem, x = Stem().eval(), images()
    stem.conv.weight.requires_grad_(False)
    assert not any(
        p.requires_grad for p in replearn.fast.streamline(stem, x, flatten=True).parameters() if p.dim() > 3
    )
    stem.conv.weight.requires_grad_(True)
    flat: Any = replearn.fast.streamline(stem, x, flatten=True)
    for _ in range(2):
        for model in (stem, flat):
            model.zero_grad()
            model(x).square().sum().backward()
            torch.optim.SGD(model.parameters(), 1e-3).step()
    for one, other in zip(stem.conv.parameters(), flat.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(other.flatten(), one.flatten())
        torch.testing.assert_close(other.grad.flatten(), one.grad.flatten(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(flat(x), stem(x))


@pytest.mark.usefixtures("apart")
def test_it_costs_as_many_launches_and_moves_fewer_bytes() -> None:
    torch.manual_seed(0)
    stem, x = Stem().eval(), images(1)
    moved, before = (
        count(model, x) for model in (replearn.fast.streamline(stem, x, flatten=True), flatten(stem, x))
    )
    assert moved.launches == before.launches == 4
    assert moved.flops == before.flops
    assert moved.bytes_moved < 0.7 * before.bytes_moved


class Ways(nn.Module):
    """A convolution, an activation and a pool, in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv, self.other = how, nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 1)
        self.free, self.groups = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(3, 6, 3, groups=3)
        self.stem, self.norm = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(True)), nn.BatchNorm2d(6)
        self.tied = nn.Conv2d(3, 6, 1)
        self.tied.bias = self.other.bias
        self.register_buffer("shift", torch.randn(6))
        more = {"indices": "return_indices", "dilated": "dilation", "rounded up": "ceil_mode"}
        settings: dict[str, Any] = {more[how]: 2 if how == "dilated" else True} if how in more else {}
        self.pool = nn.MaxPool2d(3, 1 if how == "no stride" else 2, 1, **settings)

    def forward(self, x: Tensor) -> Any:
        relu, pool, y = F.relu, self.pool, self.conv(x)
        ways: dict[str, Callable[[], Any]] = {
            "module": lambda: pool(relu(y)),
            "in place": lambda: pool(relu(y, inplace=True)),
            "method": lambda: pool(y.relu()),
            "sequence": lambda: pool(self.stem(x)),
            "rounded up": lambda: pool(relu(y)),
            "function": lambda: F.max_pool2d(relu(y), 3, 2, 1),
            "torch's": lambda: torch.max_pool2d(relu(y), 2),
            "by name": lambda: F.max_pool2d(input=F.relu(input=y), kernel_size=(2, 1), stride=(2, 1)),
            "keywords": lambda: pool(relu(torch.conv2d(x, weight=self.conv.weight, bias=self.conv.bias))),
            "no bias": lambda: pool(relu(self.free(x))),
            "groups": lambda: pool(relu(self.groups(x))),
            "shared bias": lambda: pool(relu(self.other(x))) + self.tied(x)[..., ::2, ::2],
            "buffer": lambda: pool(relu(F.conv2d(x, self.conv.weight, self.shift))),
            "computed bias": lambda: pool(relu(F.conv2d(x, self.conv.weight, self.shift + 1))),
            "twice": lambda: pool(relu(y)) + F.max_pool2d(relu(self.other(x)), 3, 2, 1),
            # what stays
            "indices": lambda: pool(relu(y)),
            "indices of a function": lambda: F.max_pool2d(relu(y), 2, return_indices=True),
            "dilated": lambda: pool(relu(y)),
            "no stride": lambda: pool(relu(y)),
            "no stride of a function": lambda: F.max_pool2d(relu(y), 3, (1, 1), 1),
            "kernel of one": lambda: F.max_pool2d(relu(y), 1),
            "average": lambda: F.avg_pool2d(relu(y), 2),
            "adaptive": lambda: F.adaptive_max_pool2d(relu(y), 2),
            "bounded": lambda: pool(F.relu6(y)),
            "smooth": lambda: pool(F.gelu(y)),
            "pooled alone": lambda: pool(y),
            "no convolution": lambda: pool(relu(x)),
            "norm": lambda: pool(relu(self.norm(y))),
            "computed weight": lambda: pool(relu(F.conv2d(x, self.conv.weight * 2))),
            "pool seen with ReLU": lambda: (z := relu(y)).mean() + pool(z),
            "convolution seen": lambda: pool(relu(y)) + y.mean(),
            "changed in place": lambda: pool(relu(y, inplace=True)) + y.mean(),
            "changed and forgotten": lambda: (relu(y, inplace=True), pool(y))[1],
            "pooled twice": lambda: pool(z := relu(y)) + F.max_pool2d(z, 3, 2, 1),
        }
        return ways[self.how]()


MOVED = (
    *("module", "in place", "method", "sequence", "rounded up", "function", "torch's", "by name", "keywords"),
    *("no bias", "groups", "shared bias", "buffer", "computed bias", "twice"),
)
BIAS_STAYS = ("no bias", "groups", "shared bias", "buffer", "computed bias")
LEFT = (
    *("indices", "indices of a function", "dilated", "no stride", "no stride of a function", "kernel of one"),
    *("average", "adaptive", "bounded", "smooth", "pooled alone", "no convolution", "norm", "computed weight"),
    *("pool seen with ReLU", "convolution seen", "changed in place", "changed and forgotten", "pooled twice"),
)


def flat_ways(how: str, dtype: torch.dtype = torch.float32) -> tuple[FlatGraph, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model, x = Ways(how).eval().to(dtype), images(2, 9).to(dtype)
    return flatten(model, x), x, all_outputs(model, x)


@torch.no_grad()
def all_outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    made = model(x)
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", MOVED)
def test_ways_that_can_be_pooled_first(how: str, dtype: torch.dtype) -> None:
    flat, x, expected = flat_ways(how, dtype)
    apply_(flat, Context())
    stem = stem_of(flat)
    ends = ["pool", "relu"] if how in BIAS_STAYS else ["pool", "add", "relu"]
    assert stem[stem.index("pool") :] == ends
    assert "relu" not in stem[: stem.index("pool")]
    kept = [name for name, _ in flat.named_parameters() if name.endswith("_pooled")]
    assert len(kept) == {"twice": 2}.get(how, how not in BIAS_STAYS)
    torch.testing.assert_close(all_outputs(flat, x), expected)
    code = flat.code
    apply_(flat, Context())
    assert flat.code == code  # once is enough


@pytest.mark.parametrize("how", MOVED)
def test_on_a_cpu_the_convolution_keeps_its_bias_and_the_bits_are_the_same(how: str) -> None:
    flat, x, expected = flat_ways(how)
    names = set(flat.state_dict())
    apply_(flat, Context())
    assert stem_of(flat)[-2:] == ["pool", "relu"]
    assert set(flat.state_dict()) == names
    assert all(map(torch.equal, all_outputs(flat, x), expected))


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("how", LEFT)
def test_ways_that_stay(how: str) -> None:
    flat, x, expected = flat_ways(how)
    code = flat.code
    apply_(flat, Context())
    assert flat.code == code
    assert all(map(torch.equal, all_outputs(flat, x), expected))


@pytest.mark.usefixtures("apart")
def test_numbers_without_rounding_stay() -> None:
    model = Ways("module").eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = (10 * parameter).long()
    flat = flatten(model, images().long())
    code = flat.code
    apply_(flat, Context())
    assert flat.code == code


@pytest.mark.usefixtures("apart")
def test_a_name_that_is_taken_gets_a_longer_one() -> None:
    torch.manual_seed(0)
    stem, x = Stem().eval(), images()
    flat = flatten(stem, x)
    flat.register_buffer("conv_bias_pooled", torch.zeros(1))
    apply_(flat, Context())
    assert [name for name, _ in flat.named_parameters()] == ["conv_weight", "conv_bias_pooled_"]
    torch.testing.assert_close(flat(x), stem(x))


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@torch.no_grad()
def test_on_a_gpu_the_bits_are_the_same(
    dtype: torch.dtype | None, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stem_pass, "apply_", lambda flat, context: 0)  # those round otherwise
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)).eval().cuda()
    x = torch.randn(2, 3, 224, 224, device="cuda")
    options: dict[str, Any] = {"dtype": dtype, "channels_last": channels_last, "graph": False}
    plain, flat = (replearn.fast.streamline(stem, x, flatten=how, **options) for how in (False, True))
    assert stem_of(flat) == ["conv2d", "pool", "add", "relu"]
    for given in (x, x[:1], torch.randn(3, 3, 64, 65, device="cuda")):
        given = given.contiguous(memory_format=torch.channels_last) if channels_last else given
        assert torch.equal(flat(given), plain(given))
