"""`replearn.fast.accelerate`: the same training, whatever runs it."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
import torchvision
from interpreting import HERE, INTERPRETED, distance, runs_kernels, small_vit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import replearn
from replearn.experiments.training.step import CapturedStep, autocast_for, step_body
from replearn.fast import accelerate
from replearn.fast.graphs import capture
from replearn.fast.kernels import bn_add_relu as norm_kernel
from replearn.fast.kernels.conv3x3_small import conv3x3_small
from replearn.fast.train import known_blocks, overlapped_wgrad
from replearn.fast.train.layers import fused_blocks, fused_norms

LAST = torch.channels_last
LOW = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's products are wrong in bfloat16


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured step, on any device."""
    monkeypatch.setattr(capture._thread, "capturing", True)


def replaced(model: nn.Module, **placement: Any) -> nn.Module:
    return replearn.replace_(model, replearn.plan(model, **placement))


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return replaced(replearn.models.CifarResNet(20, width=16), interval=2).to(HERE)


def gradients(model: nn.Module, x: Tensor, *, accelerated: bool, mixed: bool = False) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    with accelerate(model) if accelerated else nullcontext():
        with torch.autocast(HERE, LOW, enabled=mixed):
            loss = model(x).float().square().mean()
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


MODELS = {
    "ours": lambda: replearn.models.CifarResNet(8, width=16),
    "replaced": small_resnet,
    "torchvision": lambda: torchvision.models.resnet18(num_classes=5),
    "bottleneck": lambda: torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], 5),
    "timm": lambda: timm.create_model("resnet18d", num_classes=5),
    "vit": lambda: replaced(small_vit(depth=4), interval=2, first=2),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("captured", [False, True])
def test_a_step_is_the_same(name: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(HERE).double().train()
    other, x = copy.deepcopy(model), torch.randn(2, 3, 16, 16, device=HERE, dtype=torch.float64)
    expected = gradients(other, x, accelerated=False)
    if captured:
        monkeypatch.setattr(capture._thread, "capturing", True)
    classes = [type(module) for module in model.modules()]
    found = gradients(model, x, accelerated=True)
    torch.testing.assert_close(found, expected)
    assert [type(module) for module in model.modules()] == classes


@runs_kernels
@pytest.mark.parametrize(
    ("name", "size", "within"), [("ours", 8, 0.3), ("replaced", 8, 0.3), ("small vit", 16, 0.1)]
)
@pytest.mark.usefixtures("capturing")
def test_kernels_train_as_torch_does(name: str, size: int, within: float) -> None:
    torch.manual_seed(0)
    model = (small_vit() if name == "small vit" else MODELS[name]()).to(HERE, memory_format=LAST).train()
    other, x = copy.deepcopy(model), torch.randn(4, 3, size, size, device=HERE).contiguous(memory_format=LAST)
    found, expected = gradients(model, x, accelerated=True, mixed=True), gradients(other, x, accelerated=False)
    for one, two in zip(found, expected, strict=True):
        if two is not None and two.is_floating_point() and two.numel() > (64 if name == "small vit" else 1):
            assert distance(one, two) < within  # half precision against float32


@pytest.mark.usefixtures("capturing")
def test_weight_gradients_go_to_the_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[int] = []

    def note(self: Any, work: Any, *read: Tensor) -> Any:
        works.append(len(read))
        return work()

    monkeypatch.setattr(overlapped_wgrad.SideStream, "run", note)
    shared = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    model = nn.Sequential(shared, nn.Conv2d(3, 3, 1, bias=False), shared, nn.Conv2d(3, 3, 1))
    other, x = copy.deepcopy(model), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(gradients(model, x, accelerated=True), gradients(other, x, accelerated=False))
    assert works == [2]  # not the weight that is used twice, nor the layer with a bias
    works.clear()
    hooked: list[Tensor] = []
    model[1].weight.register_hook(hooked.append)
    gradients(model, x, accelerated=True)
    assert torch.equal(hooked[0], model[1].weight.grad)


@pytest.mark.parametrize("padding", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}])
@pytest.mark.usefixtures("capturing")
def test_convolutions_that_pad_in_other_ways_are_torchs(padding: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False, **padding), nn.Conv2d(16, 16, 3, bias=False, **padding))
    other, x = copy.deepcopy(model), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(gradients(model, x, accelerated=True), gradients(other, x, accelerated=False))


def test_a_failed_capture_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture._thread, "capturing", True)
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False))
    with pytest.raises(RuntimeError, match="channels"), accelerate(model):
        model(torch.randn(1, 2, 2, 2))
    assert overlapped_wgrad._aliases.get() is None
    assert overlapped_wgrad.count_use(model[0].weight) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_synthesize_their_own_weights(reentrant: bool) -> None:
    model = small_resnet().double()
    other, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8, device=HERE, dtype=torch.float64)
    plain = type(model.layer1).forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self), 2, x, use_reentrant=reentrant)

    model.layer2.forward = forward.__get__(model.layer2)
    found, expected = gradients(model, x, accelerated=True), gradients(other, x, accelerated=False)
    assert type(model.layer1).forward is plain
    sizes = len(list(model.parameters())) + 1
    torch.testing.assert_close(found[:sizes], expected[:sizes])


@runs_kernels
def test_weights_are_made_once_in_a_step_and_anew_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from replearn.fast.synthesis import ahead

    made: list[int] = []
    plain = ahead.mix

    def noting(batch: Any, dtype: torch.dtype) -> Any:
        made.append(len(batch.layouts))
        return plain(batch, dtype)

    monkeypatch.setattr(ahead, "mix", noting)
    model, x = small_resnet(), torch.randn(2, 3, 8, 8, device=HERE)
    for _ in range(2):
        with accelerate(model):
            (model(x).sum() + model(x).sum()).backward()
    assert made == [len(ahead.readers_in(model))] * 2
    with accelerate(model), torch.no_grad():
        model(x)
    assert len(made) == 2


def test_copies_and_pickles_are_of_the_original_classes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    with fused_norms(model):
        assert type(model[1]) is norm_kernel.FusedBatchNorm2d
        assert type(pickle.loads(pickle.dumps(model))[1]) is nn.BatchNorm2d
        assert type(copy.deepcopy(model)) is nn.Sequential
    assert type(model[1]) is nn.BatchNorm2d


def num_fused(model: nn.Module) -> int:
    return sum(len(modules) for modules, _, _ in fused_blocks(model))


def test_known_code_is_recognised_and_other_code_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from timm.models import resnet as timms
    from torchvision.models import resnet

    for kind in (resnet.BasicBlock, resnet.Bottleneck, resnet.ResNet, timms.BasicBlock, timms.Bottleneck):
        assert known_blocks.fused_method_of(kind) is not None, kind
    assert num_fused(torchvision.models.resnet18()) == 8 + 1
    monkeypatch.setattr(resnet.BasicBlock, "forward", lambda self, x: x)
    assert known_blocks.fused_method_of(resnet.BasicBlock) is None
    assert known_blocks.fused_method_of(type("BasicBlock", (nn.Module,), {})) is None


def test_blocks_with_more_between_their_layers_are_left_alone() -> None:
    assert num_fused(timm.create_model("resnet18")) == 8 + 1
    assert num_fused(timm.create_model("resnet18", drop_path_rate=0.1)) == 1 + 1  # the first block drops nothing
    model = timm.create_model("seresnet18")
    assert num_fused(model) == 1
    model.set_grad_checkpointing()
    assert num_fused(model) == 0


def test_the_step_body_averages_parts_and_clips() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    other, x = copy.deepcopy(model), torch.randn(4, 3)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    halves = [lambda part=part: model(part).mean() for part in x.chunk(2)]
    step_body(model, optimizers[0], lambda: halves, autocast_for(x.device, low=False), clip_norm=1e-3)()
    whole = [lambda: other(x).mean()]
    step_body(other, optimizers[1], lambda: whole, autocast_for(x.device, low=False), accelerated=False)()
    norm = torch.nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None])
    torch.testing.assert_close(model.bias.grad, 1e-3 * other.bias.grad / norm)


def reduced_bottlenecks() -> nn.Module:
    model = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [3, 1, 1, 1], num_classes=10)
    return replaced(model, interval=3, first=2, operator=replearn.operators.ReducedBottleneck())


CUDA = {
    "resnet32": (lambda: replearn.models.resnet32(), 32),
    "RepL resnet32": (lambda: replaced(replearn.models.resnet32()), 32),
    "RepL resnet34": (lambda: replaced(torchvision.models.resnet34(num_classes=10), first=2), 96),
    "RepL bottleneck": (reduced_bottlenecks, 96),
    "RepL vit": (lambda: replaced(timm.create_model("vit_small_patch16_224", img_size=64), first=2), 64),
}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CUDA)
def test_a_captured_step_trains_as_an_eager_one(name: str) -> None:
    make, size = CUDA[name]
    torch.manual_seed(0)
    model = make().cuda().to(memory_format=LAST).train()
    x = torch.randn(16, 3, size, size, device="cuda").contiguous(memory_format=LAST)
    labels, losses = torch.arange(16, device="cuda") % 10, {}
    for captured in (False, True):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, momentum=0.9)  # losses that fall slowly
        kept = torch.zeros((), device="cuda")

        def loss(own: nn.Module = own, kept: Tensor = kept) -> Tensor:
            made = nn.functional.cross_entropy(own(x).float(), labels)
            kept.copy_(made.detach())
            return made

        body = step_body(own, optimizer, lambda loss=loss: [loss], autocast_for(x.device, low=True))
        step = CapturedStep(body, own, optimizer, [kept]) if captured else body
        losses[captured] = []
        for _ in range(5):
            step()
            losses[captured].append(float(kept))
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_small_convolutions_of_real_sizes_agree() -> None:
    x = torch.randn(64, 16, 32, 32, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=LAST)
    weight = torch.randn(32, 16, 3, 3, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = conv3x3_small(x, weight), nn.functional.conv2d(x, weight, padding=1)
    assert distance(found, expected) < 1e-2
