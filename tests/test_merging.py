"""Merged sums: the same map with a launch less, for every convolution and matrix that can take x up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ZOO, apart, outputs

import replearn
from replearn import operators
from replearn.deployment.merge import can_merge, merge_, merged
from replearn.fast.inference import Autocast, cast_once_
from replearn.operators._base.plain import parts_of_residual, residual

LAYERS: dict[str, Any] = {
    "3x3": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "no bias": lambda: nn.Conv2d(6, 6, 3, padding=1, bias=False),
    "1x1": lambda: nn.Conv2d(6, 6, 1),
    "groups": lambda: nn.Conv2d(6, 6, 3, padding=1, groups=3),
    "depthwise": lambda: nn.Conv2d(6, 6, 5, padding=2, groups=6),
    "dilated": lambda: nn.Conv2d(6, 6, 3, padding=2, dilation=2),
    "oblong": lambda: nn.Conv2d(6, 6, (3, 5), padding=(1, 4), dilation=(1, 2)),
    "same": lambda: nn.Conv2d(6, 6, 5, padding="same", dilation=2),
    "reflected": lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular"),
    "channels last": lambda: nn.Conv2d(6, 6, 3, padding=1).to(memory_format=torch.channels_last),
    "linear": lambda: nn.Linear(7, 7),
    "linear, no bias": lambda: nn.Linear(7, 7, bias=False),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_returns_its_input_as_well(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x, before = torch.randn(2, 6, 9, 7), layer.weight.clone()
    for made, given_x, limit in ((layer, x, 1e-5), (copy.deepcopy(layer).double(), x.double(), 1e-12)):
        assert can_merge(made)
        other = merged(made)
        assert type(other) is type(made)
        assert other.weight.stride() == made.weight.stride()
        assert not merged(made.requires_grad_(False)).weight.requires_grad
        assert apart(given_x + made(given_x), other(given_x)) < limit
    assert torch.equal(layer.weight, before)  # the given one is not changed


REFUSED: dict[str, Any] = {
    "even": lambda: nn.Conv2d(4, 4, 2),
    "unpadded": lambda: nn.Conv2d(4, 4, 3),
    "one side padded": lambda: nn.Conv2d(4, 4, 3, padding=(1, 0)),
    "strided": lambda: nn.Conv2d(4, 4, 1, stride=2),
    "wider": lambda: nn.Conv2d(1, 4, 1),
    "broadcasting": lambda: nn.Linear(4, 1),
    "sequence": lambda: nn.Sequential(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_take_x_up_stays(name: str) -> None:
    made = residual(REFUSED[name]())
    assert merge_(made) is made


@pytest.mark.parametrize("activation", [None, nn.ReLU(inplace=True), nn.PReLU(), F.gelu, F.relu, torch.relu])
def test_an_activation_after_the_sum_comes_after_the_merged_layer(activation: Any) -> None:
    torch.manual_seed(0)
    made, x = residual(nn.Conv2d(3, 3, 3, padding=1), activation).eval(), torch.randn(2, 3, 5, 5)
    parts = parts_of_residual(made)
    assert parts is not None
    assert (parts[1] is None) == (activation is None)
    plain = merge_(made)
    assert type(plain) is (nn.Conv2d if activation is None else nn.Sequential)
    assert not any(part.training for part in plain.modules())
    with torch.no_grad():
        assert apart(made(x.clone()), plain(x.clone())) < 1e-6
    if activation in (F.relu, torch.relu):
        assert type(plain[1]) is nn.ReLU


def sums_in(model: nn.Module) -> int:
    return sum(parts_of_residual(part) is not None for part in model.modules())


@pytest.mark.parametrize(
    ("name", "options", "merges"),
    [
        ("cifar_resnet", operators.Basic(correction="low-rank", rank=2), True),
        ("timm_vit", operators.Projection(correction="full"), True),
        ("timm_vit", operators.AttentionMLP(), True),
        ("hf_llama", operators.Projection(), True),
        ("declared_tuple", operators.Projection(), True),
        ("timm_vit", operators.HeadWise(), False),
        ("timm_vit", operators.MLP(), False),
        ("torchvision_bottleneck", operators.ReducedBottleneck(), False),
    ],
)
def test_operators_of_every_kind_merge_where_they_end_in_one_map(name: str, options: Any, merges: bool) -> None:
    model, batch = ZOO[name].replaced(options), ZOO[name].batch()
    before = outputs(model, batch)
    plain = replearn.deploy(model, batch, merge=True)
    assert (sums_in(plain) < sums_in(replearn.deploy(model))) is merges
    for one, other in zip(before, outputs(plain, batch), strict=True):
        assert apart(one, other) < 1e-5
    for one, other in zip(before, outputs(model, batch), strict=True):
        assert torch.equal(one, other)  # neither door touched it


def test_operators_without_a_sum_have_nothing_to_merge() -> None:
    for options in (operators.Removal(), operators.NoWeights(), operators.WholeBlock()):
        model = ZOO["timm_vit"].replaced(options)
        assert replearn.deploy(model, merge=True).state_dict().keys() == replearn.deploy(model).state_dict().keys()


def test_under_autocast_a_transformer_keeps_its_stream_in_float32() -> None:
    model, x = ZOO["timm_vit"].replaced(), ZOO["timm_vit"].batch()
    low: Any = replearn.deploy(model, merge=True, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    low.model.blocks[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    low(x)
    assert seen == [torch.float32]


@torch.no_grad()
@pytest.mark.parametrize("name", ["cifar_resnet", "timm_vit", "hf_llama", "hf_mistral", "encoder_pre_norm"])
def test_weights_cast_once_give_what_autocast_gives(name: str) -> None:
    model, batch = ZOO[name].replaced(), ZOO[name].batch()
    low: Any = replearn.deploy(model, dtype=torch.bfloat16)
    every_call = Autocast(replearn.deploy(model), torch.bfloat16)
    for one, other in zip(outputs(every_call, batch), outputs(low, batch), strict=True):
        assert torch.equal(one, other)
    dtypes = {p.dtype for layer in low.modules() if type(layer) is nn.Linear for p in layer.parameters()}
    assert torch.bfloat16 in dtypes or name == "cifar_resnet"
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_weights_that_other_code_may_read_are_not_cast() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

        def prepare(self) -> None:  # which is not what runs
            nn.init.zeros_(self.inner.weight)

    class Reads(Calls):
        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            out: Tensor = self.inner(x)
            return out if more is None else out * self.inner.weight.sum()

    class Hides(Calls):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > 0 else x

    layers = [nn.Linear(2, 2) for _ in range(3)]
    model = nn.Sequential(*layers, nn.LayerNorm(2), Calls(), Reads(), Hides())
    layers[1].weight = layers[2].weight
    cast_once_(model, torch.bfloat16)
    low = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.bfloat16}
    assert low == {"0.weight", "0.bias", "4.inner.weight", "4.inner.bias"}


def test_a_model_that_is_moved_runs_under_autocast_of_its_new_device() -> None:
    fast: Any = replearn.deploy(ZOO["cifar_resnet"].replaced(), dtype=torch.bfloat16)
    assert fast.device_type == "cpu"
    assert fast.to("meta").device_type == "meta"
