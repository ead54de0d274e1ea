"""Convolutions of a flat graph in channels_last: the same outputs, or the graph as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ZOO, outputs

import replearn
from replearn.fast.inlining import flatten, note_values_
from replearn.fast.kernels.stem import stem
from replearn.fast.passes import channels_last as ordering
from replearn.fast.passes import stem as stem_pass
from replearn.fast.passes._context import Context

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "on_cudnn", lambda flat: True)


def images(batch: int = 2, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


def kernels(model: Any) -> list[Tensor]:
    return [weight for weight in model.parameters() if weight.dim() == 4]


def is_last(weight: Tensor) -> bool:
    """Also where one channel, or one place, makes both orders contiguous: torch goes by the strides."""
    return weight.stride() == torch.empty_like(weight, memory_format=torch.channels_last).stride()


def near(one: Tensor, other: Tensor, share: float) -> bool:
    return float((one.float() - other.float()).abs().max()) <= share * float(other.abs().max())


@pytest.mark.parametrize("name", ["cifar_resnet", "timm_resnet", "timm_seresnet"])
def test_both_doors_order_in_half_precision(name: str) -> None:
    fresh, replaced, x = ZOO[name].fresh(), ZOO[name].replaced(), images()
    half: Any = {"flatten": True, "dtype": LOW}
    baseline, deployed = replearn.fast.streamline(fresh), replearn.deploy(replaced)
    for form, plain in (
        (replearn.fast.streamline(fresh, x, **half), baseline),
        (replearn.deploy(replaced, x, **half), deployed),
        (replearn.deploy(replaced, x, merge=True, **half), deployed),
    ):
        assert len(kernels(form)) > 2
        assert all(is_last(weight) and weight.dtype is LOW for weight in kernels(form))
        assert near(outputs(form, x)[0], outputs(plain, x)[0], 0.1)
        for other in (copy.deepcopy(form), pickle.loads(pickle.dumps(form))):
            assert all(map(is_last, kernels(other)))
            assert torch.equal(outputs(other, x)[0], outputs(form, x)[0])
    for model in (fresh, replaced, replearn.fast.streamline(fresh, x, flatten=True)):
        assert not any(map(is_last, kernels(model)))  # not touched, or in float32


class Ways(nn.Module):
    """Two convolutions and a head, with something between or after them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.one = how, nn.Conv2d(3, 4, 3, padding=1)
        self.two = nn.Conv2d(4, 4, 3, padding=1, groups=4 if how == "groups" else 1, bias=False)
        self.head, self.more = nn.Linear(64 if how in ROWS else 4, 5), nn.ConvTranspose2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.one(x))
        x = {
            "view": lambda: x.view(x.shape[0], 2, 2, x.shape[2], x.shape[3]).sum(2).repeat(1, 2, 1, 1),
            "as_strided": lambda: torch.as_strided(x, x.shape, (1024, 256, 16, 1)),
            "stride": lambda: x * x.stride(1),
            "custom": lambda: told_apart(x),
            "transposed": lambda: self.more(x),
            "weight seen": lambda: x + self.two.weight.sum(),
            "weight computed": lambda: F.conv2d(x, self.two.weight * 2, padding=1),
        }.get(self.how, lambda: x)()
        y = x if self.how == "single" else self.two(x)
        if self.how == "map":
            return {"map": y, "classes": self.head(y.mean((2, 3)))}
        if self.how == "contiguous map":
            return y.contiguous()
        return self.rows(F.avg_pool2d(y, 4)) if self.how in ROWS else self.head(y.mean((2, 3)))

    def rows(self, y: Tensor) -> Tensor:
        if self.how == "view at the end":
            return self.head(y.view(y.shape[0], -1))
        row = torch.flatten(y, 1)
        if self.how == "row written":  # seen in y where the row is a view of it
            row.mul_(2)
            return self.head(row) + y.mean()
        return self.head(torch.sigmoid(row) * row)


@torch.fx.wrap
def told_apart(x: Tensor) -> Tensor:
    return x * (1 if x.is_contiguous() else 2)


ROWS = ("flat", "view at the end", "row written")
ORDERED = ("plain", "view", "contiguous map", "flat")
LEFT = ("as_strided", "stride", "custom", "map", "view at the end", "row written")
REFUSED = ("groups", "single", "transposed", "weight seen", "weight computed")


@pytest.mark.parametrize("how", [*ORDERED, *LEFT, *REFUSED])
def test_a_graph_that_goes_by_strides_keeps_its_format(how: str) -> None:
    torch.manual_seed(0)
    model, x = Ways(how).eval(), images()
    flat = flatten(model, x)
    note_values_(flat, x, LOW)
    state, code = flat.state_dict(keep_vars=True), flat.code
    count = ordering.apply_(flat, Context(dtype=LOW, example=x))
    assert (count, [is_last(weight) for weight in kernels(flat)][:2]) == (
        (2, [True, True]) if how in ORDERED else (0, [False] * min(2, len(kernels(flat))))
    )
    assert flat.code == code
    assert how in ORDERED or all(value is state[name] for name, value in flat.state_dict(keep_vars=True).items())
    for batch in (1, 2, 3):
        if how != "as_strided" or batch == 2:
            for one, other in zip(outputs(flat, images(batch)), outputs(model, images(batch)), strict=True):
                assert near(one, other, 1e-5)
                assert one.stride() == other.stride()


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
    note_values_(flat, x, LOW)
    if ordered:
        assert ordering.apply_(flat, Context(dtype=LOW, example=x)) == 2
    monkeypatch.setattr(stem_pass, "has_triton", lambda flat: True)
    assert stem_pass.apply_(flat, Context()) == 1
    (node,) = flat.graph.find_nodes(op="call_function", target=stem)
    assert node.args[5] is ordered
    note_values_(flat, x, LOW)
    assert is_last(node.meta["value"]) is ordered  # as torch computes it
    assert near(outputs(flat, x)[0], outputs(model, x)[0], 1e-5)


POOLS: dict[str, Any] = {
    "plain": (lambda y: F.max_pool2d(torch.relu(y), 3, 2, 1), 1),
    "in place": (lambda y: F.max_pool2d(F.relu(y, inplace=True), 3, 2, 1), 1),
    "smaller": (lambda y: F.max_pool2d(torch.relu(y), 2), 0),
    "rounded up": (lambda y: F.max_pool2d(torch.relu(y), 3, 2, 1, ceil_mode=True), 0),
    "dilated": (lambda y: F.max_pool2d(torch.relu(y), 3, 2, 1, 2), 0),
    "average": (lambda y: F.avg_pool2d(torch.relu(y), 3, 2, 1), 0),
    "no ReLU": (lambda y: F.max_pool2d(y, 3, 2, 1), 0),
    "seen": (lambda y: F.max_pool2d(torch.relu(y), 3, 2, 1) + y.mean(), 0),
    "pooled twice": (lambda y: F.max_pool2d(z := torch.relu(y), 3, 2, 1) + z.mean(), 0),
}


@pytest.mark.parametrize("how", POOLS)
@torch.no_grad()
def test_which_pools_are_part_of_a_stem(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = POOLS[how][0](self.conv(x))
            return made

    torch.manual_seed(0)
    model, x = Stem().eval(), images()
    flat = flatten(model, x)
    note_values_(flat, x, None)
    monkeypatch.setattr(stem_pass, "has_triton", lambda flat: True)
    assert stem_pass.apply_(flat, Context()) == POOLS[how][1]
    for given in (x, images(1), images(3, 17)):
        torch.testing.assert_close(flat(given), model(given))
    x[0, 0, 3, 5], x[1, 1, 7, 7] = float("nan"), -float("inf")
    torch.testing.assert_close(flat(x), model(x), equal_nan=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_on_a_gpu_a_resnet_is_ordered(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = ZOO["timm_resnet"].replaced().cuda(), torch.randn(8, 3, 64, 64, device="cuda")
    form = replearn.deploy(model, x, flatten=True, merge=True, dtype=dtype, graph=True)
    assert all(is_last(weight) and weight.dtype is dtype for weight in kernels(form))
    for given in (x, x[:1], x.contiguous(memory_format=torch.channels_last)):
        assert near(form(given), model(given), {torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype])
