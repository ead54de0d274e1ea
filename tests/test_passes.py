"""The contract of every file in fast/passes, and what single passes must leave alone."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
from interpreting import distance, small_vit
from torch import Tensor, nn

import replearn
from replearn.fast import streamline
from replearn.fast.inlining import flatten, note_values_
from replearn.fast.kernels import conv_bias_add_relu as kernel
from replearn.fast.kernels.conv_bias_add_relu import conv_bias_add_relu, reference
from replearn.fast.passes import _context, passes
from replearn.fast.passes import conv_bias_add_relu as fusion
from replearn.fast.passes._context import Context

NAMES = [name for name, _ in passes()]
LOW = Context(dtype=torch.bfloat16, graph=True, fuse=True)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes rewrite as for a GPU; torch then computes what the kernels would."""
    monkeypatch.setattr(_context, "triton_runs_on", lambda device: True)
    monkeypatch.setattr(_context, "has_cudnn", lambda device: True)


def resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5).eval()


@pytest.mark.parametrize(("name", "module"), list(passes()))
def test_a_file_offers_what_the_contract_asks_for(name: str, module: Any) -> None:
    for part in ("apply_", "example"):
        says = f"fast/passes/{name}.py has no function `{part}`: see docs/how-to/new-pass.md"
        assert callable(getattr(module, part, None)), says
    assert all(NAMES.index(before) < NAMES.index(name) for before in module.AFTER)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", [*NAMES, "resnet", "vit"])
@torch.no_grad()
def test_a_pass_applies_to_its_example_and_all_passes_keep_outputs(name: str) -> None:
    torch.manual_seed(0)
    models = {"resnet": (resnet(), torch.randn(3, 3, 16, 16)), "vit": (small_vit(), torch.randn(3, 3, 16, 16))}
    model, x = models[name] if name in models else dict(passes())[name].example()
    model = streamline(model.eval())  # BatchNorms folded
    flat = flatten(model, x)
    note_values_(flat, x, LOW.dtype)
    for each, module in passes():
        count = module.apply_(flat, replace(LOW, example=x))
        assert each != name or count > 0, f"fast/passes/{name}.py leaves its own example alone"
        with torch.autocast("cpu", torch.bfloat16):
            assert distance(flat(x), model(x)) < 0.02, each
            assert distance(flat(x[:2]), model(x[:2])) < 0.02, each  # the batch size stays free
    values = {node: node.meta["value"] for node in flat.graph.nodes if node.meta.get("value") is not None}
    note_values_(flat, x, LOW.dtype)
    assert all(node.meta["value"].shape == value.shape for node, value in values.items())


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """cuDNN's operations on a CPU, and a list of their calls."""
    calls: list[Any] = []

    def relu(x: Tensor, w: Tensor, b: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
        calls.append(None)
        return reference(x, w, b, None, stride, padding, dilation)

    def add_relu(x: Tensor, w: Tensor, z: Tensor, alpha: float, b: Tensor, *sizes: Any) -> Tensor:
        calls.append(z)
        return reference(x, w, b, z, *sizes[:3])

    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)
    monkeypatch.setattr(replearn.fast.inference, "has_cudnn", lambda device: True)
    monkeypatch.setattr(_context, "has_cudnn", lambda device: True)
    plain = kernel.fits

    def fits(*given: Any) -> bool:
        tensors = [None if each is None else OnGpu(each) for each in given[:4]]
        return not torch.is_grad_enabled() and plain(*tensors, *given[4:])

    monkeypatch.setattr(kernel, "fits", fits)
    return calls


class OnGpu:
    """A tensor that says it is on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_cuda, self.dtype = tensor, True, tensor.dtype
        self.requires_grad, self.numel = tensor.requires_grad, tensor.numel

    def __len__(self) -> int:
        return len(self.tensor)

    def __bool__(self) -> bool:
        return True


def num_fused(model: Any) -> int:
    flat = getattr(model, "model", model)
    return len(flat.graph.find_nodes(op="call_function", target=conv_bias_add_relu))


def test_convolutions_are_validated_and_fused(cudnn: list[Any]) -> None:
    torch.manual_seed(0)
    model, x = resnet(), torch.randn(2, 3, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        form = streamline(model, x, flatten=True, fuse=True)
    assert num_fused(form) == 9
    cudnn.clear()
    with torch.no_grad():
        torch.testing.assert_close(form(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(cudnn) == 9
    assert sum(z is not None for z in cudnn) == 4
    cudnn.clear()
    torch.testing.assert_close(copy.deepcopy(form)(x), model(x), rtol=1e-4, atol=1e-4)  # gradients are torch's
    assert not cudnn


@pytest.mark.parametrize("wrong", ["off", "nan", "error", "shape"])
def test_a_convolution_that_fails_stays_torchs(
    wrong: str, cudnn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.cudnn_convolution_relu

    def broken(*given: Any) -> Tensor:
        made = plain(*given)
        if wrong == "error":
            raise RuntimeError("no engine")
        return {"off": made + 0.1, "nan": made * torch.nan, "shape": made[:1]}[wrong]

    monkeypatch.setattr(torch, "cudnn_convolution_relu", broken)
    torch.manual_seed(0)
    model, x = resnet(), torch.randn(2, 3, 16, 16)
    with pytest.warns(UserWarning, match="5 of 9 convolutions stay torch's"):
        form = streamline(model, x, flatten=True, fuse=True)
    assert num_fused(form) == 4
    with torch.no_grad():
        torch.testing.assert_close(form(x), model(x), rtol=1e-4, atol=1e-4)


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv, self.other = how, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.row = nn.Parameter(torch.randn(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "seen":
            return torch.relu(y) + y
        if self.how == "broadcast":
            return torch.relu(y + self.row)
        if self.how == "written":
            z = self.other(x)
            x.add_(1)
            return torch.relu(y + z)
        if self.how == "weight read":
            return torch.relu(y) * self.conv.weight.sum()
        return torch.relu(y + self.other(x))


@pytest.mark.parametrize(
    ("how", "count"), [("plain", 1), ("seen", 0), ("broadcast", 0), ("written", 0), ("weight read", 0)]
)
def test_what_others_read_is_not_fused(how: str, count: int) -> None:
    torch.manual_seed(0)
    model, x = Net(how).eval(), torch.randn(2, 3, 5, 5)
    flat = flatten(model, x.clone())
    note_values_(flat, x.clone(), None)
    assert fusion.apply_(flat, Context(fuse=True)) == count
    torch.testing.assert_close(flat(x.clone()), model(x.clone()))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["resnet34", "vit"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("graph", [False, True])
@torch.no_grad()
def test_on_a_gpu_a_deployed_model_is_what_torch_makes_of_it(
    name: str, dtype: torch.dtype | None, graph: bool
) -> None:
    torch.manual_seed(0)
    model: Any = torchvision.models.resnet34() if name == "resnet34" else small_vit(img_size=32, embed_dim=192)
    size = 224 if name == "resnet34" else 32
    model, fuse = model.cuda().eval(), name == "resnet34"
    for batch in (3, 64):
        x = torch.randn(batch, 3, size, size, device="cuda")
        form = streamline(model, x, flatten=True, dtype=dtype, graph=graph, fuse=fuse)
        for _ in range(2):
            found = form(x)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            assert distance(found, model(x)) < 0.02
