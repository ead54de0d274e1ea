"""Flat graphs: the same outputs at every batch size, nothing idle left in them, or a clear refusal.

Bit for bit the same, but for those that compute one token instead of all.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from zoo import ZOO, apart, outputs

import replearn
from replearn import ReplearnError
from replearn.deployment.exporting import export
from replearn.fast.graph_module import FlatGraph
from replearn.fast.inlining import flatten
from replearn.fast.passes.token_slice import sliced_token
from replearn.fast.verify import other_batch

TRACED = (
    *("cifar_resnet", "torchvision_basic", "torchvision_vit", "timm_seresnet", "timm_vit", "timm_vit_scaled"),
    *("timm_vit_parallel", "timm_deit", "timm_beit", "timm_cait", "timm_sam", "timm_convit", "swin"),
    *("declared_tuple", "sequential"),
)


def ops(flat: Any) -> set[str]:
    return {node.op for node in flat.graph.nodes} - {"placeholder", "output"}


def picks(flat: Any) -> bool:
    """One token's products may be summed in another order than those of all tokens."""
    return any(sliced_token(node) is not None for node in flat.graph.nodes)


@pytest.mark.parametrize("name", TRACED)
def test_a_flat_graph_gives_the_same_bits_at_every_batch_size(name: str) -> None:
    model, batch = ZOO[name].replaced(), ZOO[name].batch()
    plain = replearn.deploy(model)
    flat = replearn.deploy(model, batch, flatten=True)
    assert isinstance(flat, FlatGraph)
    for given in (batch, batch[:1], batch.repeat(3, *[1] * (batch.dim() - 1))):
        for one, other in zip(outputs(plain, given), outputs(flat, given), strict=True):
            assert torch.equal(one, other) or (picks(flat) and apart(one, other) < 1e-6)


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_scaled", "cifar_resnet", "torchvision_vit", "timm_beit"])
def test_under_autocast_the_bits_are_the_same_too(name: str) -> None:
    model, batch = ZOO[name].replaced(), ZOO[name].batch()
    plain: Any = replearn.deploy(model, dtype=torch.bfloat16)
    flat: Any = replearn.deploy(model, batch, flatten=True, dtype=torch.bfloat16)
    for one, other in zip(outputs(plain, batch), outputs(flat, batch), strict=True):
        assert torch.equal(one, other) or (picks(flat.model) and apart(one, other) < 0.02)
    if name != "torchvision_vit":  # whose attention is one of torch's layers, and stays a module
        weights = [p for key, p in flat.model.named_parameters() if key.endswith(("qkv_weight", "conv1_weight"))]
        assert {p.dtype for p in weights} <= {torch.bfloat16}


def test_a_model_without_operators_is_flattened_alike() -> None:
    model, x = ZOO["timm_vit"].fresh(), ZOO["timm_vit"].batch()
    flat = replearn.fast.streamline(model, x, flatten=True)
    assert picks(flat)
    assert (flat(x) - model(x)).abs().max() < 1e-6
    assert ops(flat) == {"call_function", "call_method", "get_attr"}
    images = torch.randn(2, 3, 16, 16)
    last = replearn.fast.streamline(ZOO["timm_resnet"].fresh(), images, flatten=True, channels_last=True)
    kernels = [p for p in last.parameters() if p.dim() == 4 and p.shape[-1] > 1 and p.shape[1] > 1]
    assert kernels
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)


class Idle(nn.Module):
    """Checks its input, drops nothing out, computes what nobody reads, and writes in place."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[0] > 0, "empty")
        y = F.dropout(x, 0.5, training=False) + F.dropout(x, 0.5, False)
        y.mean(), torch.abs(y), y.shape[1]
        y.add_(1)
        F.relu(y, inplace=True)
        torch.neg(y, out=y)
        return F.layer_norm(F.relu(y), (4,), eps=1.0)


def test_checks_idle_layers_and_dead_code_are_dropped() -> None:
    model, x = Idle().eval(), torch.randn(3, 4)
    flat = flatten(model, x)
    calls = [getattr(n.target, "__name__", n.target) for n in flat.graph.nodes if n.op.startswith("call")]
    assert calls == ["add", "add_", "relu_", "neg", "relu", "layer_norm"]
    assert torch.equal(flat(x), model(x))


class Ways(nn.Module):
    """Takes a way by its arguments, shares a weight, and reads a buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("shift", torch.randn(4))
        self.table = torch.randn(4)

    def forward(self, x: Tensor, mask: Tensor | None = None, double: bool = False) -> Tensor:
        x = self.two(F.relu(self.one(x))) + self.shift + self.table
        x = x + torch.zeros(x.shape[0], 1, device=x.device)
        x = x if mask is None else x * mask
        return 2 * x if double else x


def test_the_graph_takes_the_arguments_of_its_example() -> None:
    model, x = Ways().eval(), torch.randn(5, 4)
    mask = torch.rand(5, 1)
    bare = flatten(model, x)
    assert torch.equal(bare(x), model(x))
    with pytest.raises(TypeError, match="mask"):
        bare(x, mask=mask)
    masked = replearn.fast.streamline(model, {"x": x, "mask": mask}, flatten=True)
    assert torch.equal(masked(x=x, mask=mask), model(x, mask))
    with pytest.raises(ReplearnError, match=r"torch\.fx can't trace its code .*Leave flatten off"):
        flatten(model, (x, None, True))


def test_weights_stay_shared_and_go_where_the_graph_goes() -> None:
    model, x = Ways().eval(), torch.randn(5, 4)
    flat: Any = flatten(model, x)
    assert len(list(flat.parameters())) == 3
    assert len(list(flat.buffers())) == 2
    wide = flat.double()
    assert torch.equal(wide(x.double()), copy.deepcopy(model).double()(x.double())) or wide is flat
    assert all(tensor.dtype is torch.float64 for tensor in (*wide.parameters(), *wide.buffers()))
    assert "table" not in dict(model.named_buffers())  # tracing left the model as it was


def test_a_flat_graph_copies_pickles_compiles_and_has_gradients() -> None:
    model, x = ZOO["timm_vit"].replaced(), ZOO["timm_vit"].batch()
    flat: Any = replearn.deploy(model, x, merge=True, flatten=True)
    expected = outputs(flat, x)[0]
    saved = pickle.dumps(flat)
    assert b"replearn" not in saved  # it loads where this package is not installed
    again, twin = pickle.loads(saved), copy.deepcopy(flat)
    assert twin.code == flat.code
    for other in (again, twin, copy.deepcopy(again)):
        assert torch.equal(outputs(other, x)[0], expected)
        assert set(other.state_dict()) == set(flat.state_dict())
    twin.load_state_dict({key: torch.zeros_like(value) for key, value in flat.state_dict().items()})
    assert not torch.equal(outputs(twin, x)[0], expected)
    torch.compiler.reset()
    fast = torch.compile(flat, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs(fast, x)[0], expected)
    flat(x).sum().backward()
    assert all(p.grad is not None for p in flat.parameters())
    assert not flat.training
    assert torch.equal(outputs(flat.train(), x)[0], expected)  # dropout is gone


def test_weights_alone_of_a_flat_graph_are_refused(tmp_path: Any) -> None:
    model, x = ZOO["cifar_resnet"].replaced(), ZOO["cifar_resnet"].batch()
    flat = replearn.deploy(model, x, flatten=True)
    with pytest.raises(ReplearnError, match=r"names of its own for its weights.*gives without flatten"):
        export(flat, tmp_path / "model.safetensors", x)
    assert not list(tmp_path.iterdir())


class Bends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:2] if isinstance(x, fx.Proxy) else x


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model[0].register_forward_hook(lambda *given: None)
    return model


@pytest.mark.parametrize(
    ("make", "example", "says"),
    [
        (lambda: nn.Linear(4, 4).eval(), None, "flatten=True needs an example of the model's input"),
        (hooked, torch.randn(2, 4), "Sequential can't be flattened: 0 has forward hooks.*Remove them"),
        (lambda: Bends().eval(), torch.randn(2, 4), r"fx can't trace its code \(TraceError: .*control flow"),
        (lambda: nn.Linear(4, 4).eval(), (1, 2, 3), r"can't trace its code \(TypeError: too many positional"),
        (ZOO["hf_gpt2"].fresh, ZOO["hf_gpt2"].batch(), "GPT2LMHeadModel can't be .*Leave flatten off"),
        (lambda: Fixed().eval(), torch.randn(2, 4), "differs from the model: output 0 has the shape"),
    ],
)
def test_what_cannot_be_flattened_is_said(make: Callable[[], nn.Module], example: Any, says: str) -> None:
    with pytest.raises(ReplearnError, match=f"(?s){says}"):
        replearn.fast.streamline(make(), example, flatten=True)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.calls.add_(1)


def test_running_a_graph_on_the_example_leaves_its_buffers() -> None:
    model, x = Counting().eval(), torch.randn(2, 3)
    flat = replearn.fast.streamline(model, x, flatten=True)
    assert (float(model.calls), float(flat.calls)) == (0, 0)


class Joins(nn.Module):
    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        return torch.cat((memory, x)) if memory.dim() else x + memory


@pytest.mark.parametrize("memory", [torch.zeros(0, 3), torch.tensor(2.0)], ids=["empty", "one number"])
def test_an_example_may_hold_something_empty_beside_its_samples(memory: Tensor) -> None:
    replearn.fast.streamline(Joins().eval(), (memory, torch.randn(2, 3)))
    with pytest.raises(ReplearnError, match="hold no number"):
        replearn.fast.streamline(Joins().eval(), (memory, torch.randn(0, 3)))
    assert other_batch((memory, torch.zeros(0, 3)))[1].shape == (0, 3)


@fx.wrap
def add_(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def test_a_function_called_only_for_what_it_writes_stays() -> None:
    """As torchvision's MViT adds its shortcut, in a function that torch.fx does not look into."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x)
            add_(made, x)
            return made

    model, x = Adds().eval(), torch.randn(3, 8)
    assert torch.equal(replearn.fast.streamline(model, x, flatten=True)(x), model(x))


def test_a_model_that_draws_is_compared_on_the_same_numbers() -> None:
    """As Hugging Face's ViTMAE masks patches at random, in eval mode too."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = x + self.layer(x * (torch.rand(x.shape) < 0.5))
            return made

    model = nn.Sequential(*(Masks() for _ in range(5)))
    replearn.replace_(model, replearn.plan(model)).eval()
    deployed, x = replearn.deploy(model, torch.randn(3, 8)), torch.randn(3, 8)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(deployed(x), expected)
