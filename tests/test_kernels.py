"""The contract of every file in fast/kernels: its kernel gives what its reference does, values, gradients, shapes.

Kernels run on a GPU, or in Triton's interpreter: the last test runs the others there, in one process. `CALLS` has
small inputs that the kernel takes; a kernel without any is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from interpreting import HERE, INTERPRETED, distance, runs_kernels
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from replearn.costs.precision import float32_products
from replearn.fast import kernels
from replearn.fast.kernels import bn_add_relu
from replearn.fast.kernels.bn_add_relu import FusedBatchNorm2d

HALF, LAST = torch.float16, torch.channels_last
Call = tuple[tuple[Any, ...], dict[str, Any]]


def of(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False, scale: float = 1.0) -> Tensor:
    made = (scale * torch.randn(*shape, device=HERE)).to(dtype)
    return made.contiguous(memory_format=LAST) if last else made


def inference_calls(name: str) -> Iterator[tuple[Any, ...]]:
    if name == "linear_residual":
        for rows, branch in ((3, None), (70, of(64, 64, dtype=HALF, scale=0.1))):
            weight = of(64, 128, dtype=HALF, scale=0.1)
            yield of(2, rows, 64), of(2, rows, 128, dtype=HALF), weight, of(64), branch
        yield of(1, 5, 64), of(1, 5, 64, dtype=HALF)[:, :], of(64, 64, dtype=HALF, scale=0.1), None, None
    if name == "layernorm_half":
        yield of(2, 5, 48) + 30, (48,), of(48), of(48), 1e-6
        yield of(3, 100), (100,), None, None
    if name == "patch_embed":
        weight = of(64, 3, 8, 8, dtype=HALF, scale=0.1)
        yield of(2, 3, 16, 24, last=True), weight, of(1 + 6, 64), 1
        yield of(1, 3, 16, 16), weight, of(4, 64), 0
    if name == "stem":
        for dtype, channels_last in ((HALF, True), (torch.float32, False)):
            weight = of(16, 3, 7, 7, dtype=dtype, scale=0.1)
            yield of(2, 3, 20, 26), weight, of(16, 1, 1), (2, 3, 3, 2, 1), channels_last, 1


TRAINED: dict[str, Callable[[], Iterator[Call]]] = {
    "attention_short": lambda: iter(
        [((of(2, 17, 3 * 2 * 16, dtype=HALF), 2), {}), ((of(1, 5, 3 * 32, dtype=HALF), 1), {"causal": True})]
    ),
    "conv3x3_small": lambda: iter(
        [
            ((of(2, 16, 6, 5, dtype=HALF, last=True), of(32, 16, 3, 3, dtype=HALF, scale=0.1)), {}),
            ((of(1, 3, 5, 8, dtype=HALF, last=True), of(16, 3, 3, 3, dtype=HALF, scale=0.2)), {}),
        ]
    ),
}
INFERENCE = ("layernorm_half", "linear_residual", "patch_embed", "stem")
ELSEWHERE = {  # what has a test file of its own
    "bn_add_relu": "below",
    "conv1x1_bn": "test_expansion.py",
    "conv_bias_add_relu": "test_passes.py",
    "reduced_bottleneck": "test_squeeze.py",
}


def module_of(name: str) -> Any:
    return import_module(f"{kernels.__name__}.{name}")


def test_every_kernel_is_tested() -> None:
    found = {file.name for file in iter_modules(kernels.__path__) if not file.name.startswith("_")}
    assert found == {*TRAINED, *INFERENCE, *ELSEWHERE}
    for name in (*TRAINED, *INFERENCE):
        assert all(callable(getattr(module_of(name), part)) for part in (name, "reference", "fits"))


@runs_kernels
@pytest.mark.parametrize("name", INFERENCE)
@torch.no_grad()
def test_kernel_at_inference(name: str) -> None:
    torch.manual_seed(0)
    module, operation = module_of(name), getattr(torch.ops.replearn, name)
    for given in inference_calls(name):
        mixed = torch.autocast(HERE, HALF, enabled=given[1] is None or name != "stem" or given[1].dtype is HALF)
        with mixed, float32_products(tf32=True):
            assert module.fits(*given)
            found = getattr(module, name)(*given)
            double = [g.double() if isinstance(g, Tensor) else g for g in given]
            with torch.autocast(HERE, enabled=False):
                expected = module.reference(*(double[:5] if name == "stem" else double))
            with torch.enable_grad():  # torch computes what needs a gradient
                needing = [g.clone().requires_grad_() if isinstance(g, Tensor) else g for g in given]
                assert not module.fits(*needing)
                assert getattr(module, name)(*needing).requires_grad
            again = torch.compile(getattr(module, name), backend="eager")(*given)
        assert distance(found, expected) < 2e-3
        assert distance(again.double(), expected) < 5e-3
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(g) if isinstance(g, Tensor) else g for g in given]
            if name == "layernorm_half":
                fakes = [fakes[0], fakes[2], fakes[3], 1e-5, HALF]
            fake = operation.default(*(fakes[:5] if name == "stem" else fakes))
        assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


@runs_kernels
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("mixed", [False, True])
def test_kernel_in_training(name: str, mixed: bool) -> None:
    torch.manual_seed(0)
    module = module_of(name)
    for given, options in TRAINED[name]():
        leaves = [(g.float() if mixed else g).requires_grad_() if isinstance(g, Tensor) else g for g in given]
        wide = [g.detach().double().requires_grad_() if isinstance(g, Tensor) else g for g in leaves]
        with torch.autocast(HERE, HALF) if mixed else nullcontext():
            assert module.fits(*leaves, **options)
            found = getattr(module, name)(*leaves, **options)
        expected = module.reference(*wide, **options)
        grad = torch.randn_like(found)
        found.backward(grad)
        expected.backward(grad.double())
        assert found.dtype is HALF
        assert distance(found, expected) < 2e-3
        for one, other in zip(leaves, wide, strict=True):
            if isinstance(one, Tensor):
                assert one.grad is not None
                assert one.grad.dtype is one.dtype
                assert distance(one.grad, other.grad) < 4e-3
        if not mixed:
            torch.library.opcheck(
                getattr(torch.ops.replearn, name).default,
                (*(g.detach() if isinstance(g, Tensor) else g for g in leaves), bool(options.get("causal"))),
                test_utils=("test_schema", "test_faketensor"),
            )


def norm_of(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width).to(HERE)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
    return norm


@runs_kernels
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bn_add_relu(residual: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, u = (of(3, 32, 5, 7, dtype=dtype, last=True).requires_grad_() for _ in range(2))
    wide_x, wide_u = (t.detach().double().requires_grad_() for t in (x, u))
    norm = norm_of(32)
    wide = nn.BatchNorm2d(32).to(HERE).double()
    wide.load_state_dict(norm.state_dict())
    object.__setattr__(norm, "__class__", FusedBatchNorm2d)
    assert bn_add_relu.fits(x, norm, u if residual else None)
    found = bn_add_relu.fused_norm(x, norm, nn.functional.relu, u if residual else None)
    expected = (wide(wide_x) + (wide_u if residual else 0)).relu()
    assert found is not None
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad.double())
    near = 1e-5 if dtype is torch.float32 else 2e-2
    pairs = [(found, expected), (x.grad, wide_x.grad), (norm.weight.grad, wide.weight.grad)]
    pairs += [(norm.bias.grad, wide.bias.grad), (norm.running_var, wide.running_var)]
    pairs += [(u.grad, wide_u.grad)] if residual else []
    assert all(distance(one, other) < near for one, other in pairs)
    assert norm.num_batches_tracked == 1
    norm.register_forward_hook(lambda *_: None)
    assert not bn_add_relu.fits(x, norm, None)


@pytest.mark.skipif(HERE == "cuda" or INTERPRETED, reason="the kernels run for real, or interpreted")
def test_torch_computes_without_a_gpu() -> None:
    torch.manual_seed(0)
    for name in INFERENCE:
        for given in inference_calls(name):
            module = module_of(name)
            assert not module.fits(*given)
