"""Folding BatchNorms: what is proven safe goes into the convolution, everything else stays and says why."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d
from zoo import apart, shake_, torchvision_bottleneck

import replearn
from replearn import ReplearnError
from replearn.fast.folding import fold_
from replearn.fast.verify import TOLERANCE, verify
from replearn.operators.basic import BasicOperator


def settled(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    shake_(model, 0.1)
    return model.eval()


def folded(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    fold_(made)
    return made


@torch.no_grad()
def worst(model: nn.Module, other: nn.Module, x: Tensor) -> float:
    return apart(model(x), other(x))


def timm_net(name: str) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, num_classes=4)


def torchvision_net(name: str) -> nn.Module:
    return pytest.importorskip("torchvision").models.get_model(name, weights=None, num_classes=4)


WHOLE: dict[str, Any] = {
    "cifar": lambda: replearn.models.CifarResNet(20, width=4),
    "torchvision bottlenecks": torchvision_bottleneck,
    "torchvision mobilenet_v2": lambda: torchvision_net("mobilenet_v2"),
    "timm resnet10t": lambda: timm_net("resnet10t"),
    "timm norm with activation": lambda: timm_net("tf_efficientnet_b0"),  # BatchNormAct2d, Conv2dSame
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_norm_of_a_usual_network_is_folded(name: str) -> None:
    model = settled(WHOLE[name]())
    folds = replearn.fast.find_folds(model)
    assert folds
    assert [str(fold) for fold in folds if fold.conv is None] == []
    plain, x = folded(model), torch.randn(2, 3, 32, 32)
    assert worst(model, plain, x) < 1e-5
    assert worst(model.double(), folded(model), x.double()) < 1e-12
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in plain.modules())
    assert not any(layer.training for layer in plain.modules())


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2),
        nn.ConvTranspose2d(4, 6, 2, bias=False),
    ],
)
def test_other_convolutions_fold_too(conv: nn.Module) -> None:
    model = settled(nn.Sequential(conv, nn.BatchNorm2d(6), nn.ReLU()))
    assert worst(model.double(), folded(model), torch.randn(2, 4, 8, 8, dtype=torch.float64)) < 1e-12
    assert type(folded(model)[1]) is nn.Identity


class Pair(nn.Module):
    """A convolution and its norm, run by code that each subclass bends."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class Around(nn.Module):
    """Runs a pair, and may use its layers behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()


def run_by(forward: Callable[..., Tensor], base: type[nn.Module] = Pair) -> type[nn.Module]:
    return type("Bent", (base,), {"forward": forward})


class AsksForBias(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return 2 * y if self.conv.bias is None else y


class InCachedProperty(Around):
    @functools.cached_property
    def layer(self) -> nn.Module:
        return self.pair.conv

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x) + self.layer(x) if x.sum() > -1e9 else x


class InComprehension(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x) + sum([self.pair.conv(y) for y in (x,)]) if x.sum() > -1e9 else x


class ByName(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x) + getattr(self.pair, "conv")(x) if x.sum() > -1e9 else x  # noqa: B009


class SharedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(), Pair()
        self.two.conv = self.one.conv

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


def hooked() -> nn.Module:
    model = Pair()
    model.conv.register_forward_hook(lambda *_: None)
    return model


def rough() -> nn.Module:
    model = run_by(lambda self, x: self.bn(self.conv(x.bfloat16())))()
    model.conv.bfloat16()
    return model


class Derived(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


READ_TWICE = run_by(lambda self, x: self.bn(y := self.conv(x)) + y)
NORM_TWICE = run_by(lambda self, x: self.bn(self.conv(x)) + self.bn(self.other(x)))
BETWEEN = run_by(lambda self, x: self.bn(self.conv(x).relu()))
BORROWING = run_by(lambda self, x: self.bn(self.conv(x)) + x * self.conv.weight.sum())
BRANCHING = run_by(lambda self, x: self.bn(self.conv(x)) if x.sum() > 0 else self.conv(x))
ASKS_THE_NORM = run_by(lambda self, x: self.bn(self.conv(x)) * self.bn.num_features)
# an ordinary stand-in of torch.fx would take the other branch, in which the pair looks safe
CHECKS = run_by(lambda self, x: self.bn(y := self.conv(x)) + y if isinstance(x, Tensor) else self.bn(self.conv(x)))
OUTSIDE = run_by(lambda self, x: self.pair(x) + self.pair.conv(x), Around)
OUTSIDE_NORM = run_by(lambda self, x: self.pair(x) + self.pair.bn(x), Around)
Seq = nn.Sequential
STATELESS = nn.BatchNorm2d(3, track_running_stats=False)

UNSAFE: dict[str, tuple[Any, str]] = {
    "read twice": (READ_TWICE, "the output of conv is used elsewhere too"),
    "norm twice": (NORM_TWICE, "the model calls it 2 times"),
    "something between": (BETWEEN, "its input is not the output of a convolution"),
    "weight read": (BORROWING, "the model uses conv as well"),
    "control flow": (BRANCHING, "the code of the model can't be traced (TraceError"),
    "asks for the bias": (AsksForBias, "asks for more than the output of its layers"),
    "asks the norm": (ASKS_THE_NORM, "asks for more than the output of its layers"),
    "tests for tensors": (CHECKS, "the output of conv is used elsewhere too"),
    "used from outside": (OUTSIDE, "the model uses pair.conv as well"),
    "norm used from outside": (OUTSIDE_NORM, "the model uses pair.bn as well"),
    "untraced, in a comprehension": (InComprehension, "and may use pair.conv as well"),
    "untraced, in a cached property": (InCachedProperty, "and may use pair.conv as well"),
    "untraced, by its name": (ByName, "and may use pair.conv as well"),
    "shared layer": (SharedLayer, "one.conv is shared with another part of the model"),
    "hooks": (hooked, "conv has hooks, which would see other values"),
    "two precisions": (rough, "conv computes in torch.bfloat16, and it in torch.float32"),
    "one statistic": (lambda: Seq(nn.Conv2d(3, 6, 1), FrozenBatchNorm2d(1)), "0 has 6 channels, and it has 1"),
    "no statistics": (lambda: Seq(nn.Conv2d(3, 3, 1), STATELESS), "it uses the statistics of each batch"),
    "linear": (lambda: Seq(nn.Linear(8, 8), nn.BatchNorm2d(3)), "its input comes from 0, a Linear"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_is_not_proven_stays_and_says_why(name: str) -> None:
    make, reason = UNSAFE[name]
    model = settled(make())
    (fold, *_) = replearn.fast.find_folds(model)
    assert fold.conv is None
    assert reason in str(fold)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(folded(model)(x), model(x))


def test_a_norm_in_train_mode_stays() -> None:
    model = Pair().eval()
    model.bn.train()
    assert str(replearn.fast.find_folds(model)[0]) == "bn stays: it uses the statistics of each batch"


@pytest.mark.parametrize("trained", [True, False])
def test_a_folded_convolution_keeps_its_memory_order_and_what_is_trained(trained: bool) -> None:
    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).requires_grad_(trained)
    conv = folded(model.to(memory_format=torch.channels_last))[0]
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert [p.requires_grad for p in conv.parameters()] == [trained, trained]


@pytest.mark.parametrize("kind", [Derived, type("BatchNorm2d", (Derived,), {})])
def test_a_norm_of_a_class_of_ones_own_is_left_alone(kind: type[Derived]) -> None:
    model = settled(nn.Sequential(nn.Conv2d(3, 3, 1), kind(3)))
    assert replearn.fast.find_folds(model) == ()


def test_the_baseline_gets_the_same_form() -> None:
    model, x = settled(replearn.models.CifarResNet(20, width=4)), torch.randn(2, 3, 16, 16)
    fast = replearn.fast.streamline(model, x, channels_last=True)
    assert fast.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert type(fast.layer2[0].bn1) is nn.Identity
    low = replearn.fast.streamline(model, x, dtype=torch.bfloat16)
    assert low(x).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(low(x).float(), model(x), rtol=0.1, atol=0.1)


def test_timm_layers_that_fuse_themselves_do_so_first() -> None:
    model = settled(timm_net("repvgg_a0"))
    x = torch.randn(1, 3, 32, 32)
    fast = replearn.fast.streamline(model, x)
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in fast.modules())
    levit = pytest.importorskip("timm.models.levit")
    model = settled(nn.Sequential(levit.LinearNorm(3, 4)))
    layer = replearn.fast.streamline(model, torch.randn(2, 5, 3))[0]
    assert type(layer) is nn.Linear
    assert not layer.training


class Counting(nn.Module):
    """Counts its calls, and answers in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = replearn.models.CifarResNet(20, width=4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Answer:
        self.calls += 1
        return Answer(self.net(x))


@dataclass
class Answer:
    logits: Tensor


def test_comparing_leaves_the_copy_as_it_was_and_sees_into_dataclasses() -> None:
    model: Any = settled(replearn.replace_(made := Counting(), replearn.plan(made, first=2)))
    x = torch.randn(2, 3, 16, 16)
    plain: Any = replearn.deploy(model, x)
    assert (float(model.calls), float(plain.calls)) == (0, 0)
    plain.net.fc.bias.data += 1
    with pytest.raises(replearn.ReplearnError, match="differs from the model"):
        verify(model, plain, x)


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_deployed_of_a_compiled_model_has_no_wrappers(inside: bool) -> None:
    model = replearn.models.CifarResNet(20, width=4)
    replearn.replace_(model, replearn.plan(model, first=2))
    settled(model)
    x, names = torch.randn(2, 3, 16, 16), replearn.deploy(model).state_dict().keys()
    if inside:
        model.layer1 = torch.compile(model.layer1, backend="eager")  # type: ignore[assignment]
    given: Any = model if inside else torch.compile(model, backend="eager")
    plain = replearn.deploy(given, x)
    assert type(plain) is type(model)
    assert plain.state_dict().keys() == names
    replearn.deploy(given, x, flatten=True)
    assert type(replearn.fast.streamline(torch.compile(plain, backend="eager"), x)) is type(model)


class Chooses(nn.Module):
    """Gives one or the other sample, by digits that float32 rounds, as a detector chooses among boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny.resnet()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x)
        return made[int(made.sum() * 1e7) % 2 :][:1]


class Amplifies(Chooses):
    """Rounding grows by ten million, as in a deep untrained network."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.sigmoid(self.body(x))
        for _ in range(28):
            made = 3.9 * made * (1 - made)
        return made


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("kind", [Chooses, Amplifies])
def test_a_difference_in_float32_is_refused_unless_float64_shows_that_it_is_rounding(
    kind: type[Chooses], broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()
    replearn.replace_(model, replearn.plan(model, 2, first=2)).eval()
    monkeypatch.setitem(TOLERANCE, torch.float32, 0.0)
    if broken:
        plain = BasicOperator.plain
        monkeypatch.setattr(BasicOperator, "plain", lambda self: nn.Sequential(plain(self), nn.Tanh()))
        with pytest.raises(ReplearnError, match="differs from the model: output 0"):
            replearn.deploy(model, torch.randn(4, 3, 8, 8))
    else:
        assert replearn.deploy(model, torch.randn(4, 3, 8, 8)).training is False
        assert replearn.fast.streamline(kind().eval(), torch.randn(4, 3, 8, 8)).training is False
