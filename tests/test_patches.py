"""A transformer's first layer in one kernel, against torch's own operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import HERE, interpret, runs_kernels
from test_narrow_convolutions import distance, needs_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import replearn
from replearn.experiments.bench.inference_counts import count
from replearn.fast.inlining import flatten, note_values_
from replearn.fast.kernels import patch_embed as operation
from replearn.fast.kernels.patch_embed import embed
from replearn.fast.passes.patch_embed import embed_patches_

pytest.importorskip("timm")
from timm.models.vision_transformer import VisionTransformer


def layer(batch: int = 2, patch: int = 8, size: int = 16, width: int = 64, first: int = 1) -> tuple[Any, ...]:
    images = torch.randn(batch, 3, size, size, device=HERE)
    weight = (torch.randn(width, 3, patch, patch, device=HERE) / (3 * patch * patch) ** 0.5).half()
    return images, weight, torch.randn(first + (size // patch) ** 2, width, device=HERE), first


def exactly(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    return operation.usual(images.half().double(), weight.double(), table.double(), first)


def small_vit(**changes: Any) -> VisionTransformer:
    torch.manual_seed(0)
    setting: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 2}
    model = VisionTransformer(**setting | {"mlp_ratio": 1, "num_classes": 10} | changes).to(HERE).eval()
    for name, parameter in model.named_parameters():
        if "token" in name or "embed" in name:  # zeros would hide what is left out
            nn.init.normal_(parameter, std=0.3)
    return model


def calls(form: Any, function: Any) -> int:
    flat = form.model if hasattr(form, "model") else form
    return sum(node.target is function for node in flat.graph.nodes)


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize(("batch", "patch", "size", "width"), [(2, 8, 16, 64), (3, 16, 32, 128), (1, 4, 16, 192)])
def test_tokens_are_those_of_an_exact_layer(batch: int, patch: int, size: int, width: int, first: int) -> None:
    for last in (False, True):
        images, weight, table, _ = layer(batch, patch, size, width, first)
        if (3 * patch * patch) % 64:
            return
        images = images.contiguous(memory_format=torch.channels_last) if last else images
        with torch.autocast(HERE, torch.float16):
            assert operation.fits(images, weight, table, first)
            found = embed(images, weight, table, first)
        assert found.shape == (batch, *table.shape)
        assert found.dtype is torch.float32
        assert distance(found, exactly(images, weight, table, first)) < 2e-6


@runs_kernels
@torch.no_grad()
def test_many_rows_and_a_part_of_a_batch() -> None:
    images, weight, table, first = layer(batch=300, patch=8, size=16, width=128)
    with torch.autocast(HERE, torch.float16):
        found = embed(images[1:, :, :, :], weight, table, first)
    assert distance(found, exactly(images[1:], weight, table, first)) < 2e-6


@runs_kernels
@pytest.mark.parametrize("change", ["size", "gradient", "no autocast", "table", "expanded", "channels", "double"])
def test_the_kernel_is_not_given_what_it_would_misread(change: str) -> None:
    images, weight, table, first = layer()
    given = {
        "size": lambda: (torch.randn(2, 3, 20, 16, device=HERE), weight, table, first),
        "gradient": lambda: (images, weight.requires_grad_(), table, first),
        "no autocast": lambda: (images, weight, table, first),
        "table": lambda: (images, weight, table[:3], first),
        "expanded": lambda: (images[:1].expand(2, -1, -1, -1), weight, table, first),
        "channels": lambda: (images[:, :1], weight, table, first),
        "double": lambda: (images.double(), weight, table, first),
    }[change]()
    with torch.autocast(HERE, torch.float16, enabled=change != "no autocast"):
        assert not operation.fits(*given)


@runs_kernels
@pytest.mark.parametrize("step", [1, 2**21])
def test_the_kernel_is_not_given_images_that_it_would_misread_since_they_lie_far_apart(step: int) -> None:
    with FakeTensorMode(), torch.autocast(HERE, torch.float16):
        _, weight, table, first = layer()
        images = torch.empty(2 * step + 1, 3, 16, 16, device=HERE)[::step]
        assert images.shape == (3, 3, 16, 16)
        assert operation.fits(images, weight, table, first) is (step == 1)


def test_what_the_kernel_does_not_take_torch_computes() -> None:
    images, weight, table, first = layer()
    fine, leaf = weight.float(), table.clone().requires_grad_()
    made = embed(images, fine, leaf, first)
    assert distance(made, exactly(images, weight, table, first)) < 2e-3
    made.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2.0))


@runs_kernels
def test_a_vision_transformer_begins_with_one_operation() -> None:
    model, x = small_vit(), torch.randn(2, 3, 16, 16, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16)
    assert calls(form, embed) == 1
    assert calls(form, torch.conv2d) + calls(form, torch.cat) == 0
    with torch.no_grad():
        exact, found = model(x), form(x)
        assert distance(found.float(), exact) < 5e-3
        assert distance(form(x[:1]).float(), exact[:1]) < 5e-3
        last = x.contiguous(memory_format=torch.channels_last)
        assert distance(form(last).float(), exact) < 5e-3
    form(x).float().sum().backward()
    with pytest.raises(RuntimeError):
        form(torch.randn(2, 3, 24, 24, device=HERE))
    counts = count(form, x)
    assert counts.flops == count(replearn.fast.streamline(model, x, flatten=True), x).flops
    replaced = replearn.replace_(small_vit(), replearn.plan(small_vit(), first=2)).eval()
    assert (
        calls(replearn.deploy(replaced, x, flatten=True, merge=True, graph=False, dtype=torch.float16), embed) == 1
    )


@runs_kernels
@pytest.mark.parametrize(
    "changes",
    [
        {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}, {"no_embed_class": True},
        {"dynamic_img_size": True}, {"embed_dim": 96, "num_heads": 3}, {"pre_norm": True},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_first_layer_stays_or_is_the_same(changes: dict[str, Any]) -> None:
    model, x = small_vit(**changes), torch.randn(2, 3, 16, 16, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16)
    assert calls(form, embed) == int("pre_norm" in changes)  # a norm comes after what is joined
    with torch.no_grad():
        assert distance(form(x).float(), model(x)) < 5e-3


def test_without_autocast_or_with_a_compiler_it_stays() -> None:
    model, x = small_vit(), torch.randn(2, 3, 16, 16, device=HERE)
    assert calls(replearn.fast.streamline(model, x, flatten=True), embed) == 0
    assert (
        calls(
            replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.bfloat16, compile=True),
            embed,
        )
        == 0
    )


class Overlapping(nn.Module):
    """Patches that overlap, or are seen by somebody else, or another sum: none that the kernel computes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        options: dict[str, Any] = {"overlap": {"stride": 4, "padding": 2}, "groups": {"groups": 2}}.get(how, {})
        self.conv = nn.Conv2d(4, 64, 8, **{"stride": 8} | options)
        side, self.first = 4 if how == "overlap" else 2, 3 if how == "one token often" else 1
        self.cls = nn.Parameter(torch.randn(1, 1, 64))
        self.pos = nn.Parameter(torch.randn(1, self.first + side**2, 64))

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.conv(x)
        if self.how == "computed bias":
            pixels = F.conv2d(x, self.conv.weight, self.pos[0, 0], 8)
        tokens = pixels.flatten(2).transpose(1, 2)
        if self.how == "turned":
            tokens = pixels.transpose(2, 3).flatten(2).transpose(1, 2)
        y = torch.cat((self.cls.expand(x.shape[0], self.first, -1), tokens), 1) + self.pos
        return y + pixels.mean() if self.how == "seen" else y


@runs_kernels
@pytest.mark.parametrize(
    ("how", "joined"),
    [
        ("overlap", 0), ("groups", 0), ("seen", 0), ("turned", 0), ("one token often", 0), ("computed bias", 0),
        ("plain", 1),
    ],
)  # fmt: skip
def test_only_patches_side_by_side_are_joined(how: str, joined: int) -> None:
    torch.manual_seed(0)
    model, x = Overlapping(how).to(HERE).eval(), torch.randn(2, 4, 16, 16, device=HERE)
    flat = flatten(model, x)
    note_values_(flat, x, torch.float16)
    embed_patches_(flat)
    assert calls(flat, embed) == joined
    assert distance(flat(x).detach(), model(x).detach()) < 1e-6


def test_shapes_are_known_without_running_it() -> None:
    with FakeTensorMode():
        made = torch.ops.replearn.embed_patches(*layer())
    assert (made.shape, made.dtype) == ((2, 5, 64), torch.float32)


def test_in_the_interpreter() -> None:
    interpret(__file__, "exact_layer or many_rows or misread or begins or another or side_by_side")


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("batch", [1, 32])
def test_on_a_gpu_a_vit_is_what_torch_makes_of_it(batch: int) -> None:
    from replearn.experiments.bench.inference_sides import make_sides

    device = torch.device("cuda")
    sides = make_sides("vit_small_16", 224, device, 2)
    x = torch.randn(batch, 3, 224, 224, device=device)
    form: Any = replearn.fast.streamline(sides.end_to_end, x, flatten=True, graph=False, dtype=torch.float16)
    assert calls(form, embed) == 1
    with torch.inference_mode():
        exact = sides.end_to_end(x)
        rough = replearn.fast.streamline(sides.end_to_end, dtype=torch.float16)(x)
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            assert distance(form(given).float(), exact) < 1.5 * distance(rough.float(), exact)
