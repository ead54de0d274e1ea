"""The contract of every file in fast/kernels: its kernel gives what its reference does, values, gradients, shapes.

Each file offers a function of its name, `reference` and `fits` with the same arguments, and `examples`. A function
that is registered with operators/functional.py returns None where it does not apply.
"""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from interpreting import HERE, INTERPRETED, distance, runs_kernels
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from replearn.costs.precision import float32_products
from replearn.fast import kernels
from replearn.fast.kernels import _dispatch, _triton, reduced_bottleneck
from replearn.fast.synthesis import fused
from replearn.fast.synthesis.batch import Batch
from replearn.operators._base.mixture import Mixture

NAMES = [file.name for file in iter_modules(kernels.__path__) if not file.name.startswith("_")]
TRITON = [file.name for file in iter_modules(_triton.__path__)]
HALF, FULL = torch.float16, torch.float32
RUNNABLE = [name for name in NAMES if HERE == "cuda" or any(file.startswith(name) for file in TRITON)]


def module_of(name: str) -> Any:
    return import_module(f"{kernels.__name__}.{name}")


def examples(name: str, dtype: torch.dtype, device: str = HERE) -> list[Any]:
    torch.manual_seed(0)
    return list(module_of(name).examples(device, dtype))


@contextmanager
def precision(autocast: bool, tf32: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(HERE, HALF, enabled=autocast))
        stack.enter_context(float32_products(tf32=tf32))
        stack.enter_context(patch.object(reduced_bottleneck, "is_capturing_here", lambda: True))
        yield


def parts(given: Any, kind: type) -> list[Any]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, kind)]


def trained(given: Any) -> list[Tensor]:
    own = [tensor for tensor in parts(given, Tensor) if tensor.is_floating_point()]
    return own + [parameter for module in parts(given, nn.Module) for parameter in module.parameters()]


def in_double(given: Any) -> Any:
    def widen(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return copy.deepcopy(leaf).double() if isinstance(leaf, nn.Module) else leaf

    return tree_map(widen, given)


class Recorder(TorchDispatchMode):
    """Records the calls of this package's custom operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "replearn":
            self.calls.append((func, tree_map(lambda a: a.detach() if isinstance(a, Tensor) else a, args)))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", NAMES)
def test_a_file_offers_what_the_contract_asks_for(name: str) -> None:
    for part in (name, "reference", "fits", "examples"):
        says = f"fast/kernels/{name}.py has no function `{part}`: see docs/how-to/new-kernel.md"
        assert callable(getattr(module_of(name), part, None)), says
    says = f"`examples` of fast/kernels/{name}.py gives no arguments in half precision"
    assert examples(name, HALF, "cpu"), says


@runs_kernels
@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_a_kernel_computes_its_reference(name: str, dtype: torch.dtype) -> None:
    module, fitted = module_of(name), 0
    run = getattr(module, name)
    for switched in (False, True):  # autocast in half precision, TF32 in full precision
        with precision(autocast=switched and dtype is HALF, tf32=switched):
            near = 1e-4 if dtype is FULL and not switched else 5e-3
            for given in examples(name, dtype):
                with torch.no_grad():
                    values = run(*given) if module.fits(*given) else None
                for tensor in trained(given):
                    tensor.requires_grad_().grad = None  # two examples may share one
                wide = in_double(given)
                if values is None and not module.fits(*given):
                    continue
                fitted += 1
                with torch.autocast(HERE, enabled=False):
                    expected = module.reference(*wide)
                if not module.fits(*given):  # it has no gradient: torch computes what needs one
                    assert distance(values, expected) < near
                    assert not switched or run(*given).requires_grad
                    continue
                compare(run(*given), expected, given, wide, near)
    assert fitted or dtype is FULL, f"fast/kernels/{name}.py: `fits` is False for all of its examples"


def compare(found: Tensor, expected: Tensor, given: Any, wide: Any, near: float) -> None:
    """Outputs, gradients, and buffers of the modules among the arguments."""
    modules = parts(given, nn.Module)
    loose = 5e-2 if modules and found.dtype is HALF else near  # a rounded value may pass a ReLU or not
    assert distance(found, expected) < near
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad.double())
    for one, other in zip(trained(given), trained(wide), strict=True):
        assert one.grad is not None
        assert one.grad.dtype is one.dtype
        assert distance(one.grad, other.grad) < loose
    for one, other in zip(modules, parts(wide, nn.Module), strict=True):
        for (key, buffer), value in zip(one.named_buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(buffer.double(), value.double(), rtol=near, atol=near, msg=key)


@runs_kernels
@pytest.mark.parametrize("name", RUNNABLE)
def test_custom_operations_have_fakes_and_flops(name: str) -> None:
    module, device, checked = module_of(name), torch.device(HERE), set()
    for given in examples(name, HALF):
        with precision(autocast=True, tf32=True):
            with Recorder() as recorder:
                made = getattr(module, name)(*given)
            if not recorder.calls:
                return  # an autograd function of registered operations, or cuDNN
            compiled = torch.compile(getattr(module, name), backend="eager")(*given)
            assert distance(compiled, made.double()) < 5e-3
        with Recorder() as recorder:
            for tensor in trained(given):
                tensor.requires_grad_()
            with precision(autocast=True, tf32=True), torch.set_grad_enabled(module.fits(*given)):
                made = getattr(module, name)(*given)
                made.backward(torch.ones_like(made)) if made.requires_grad else None
        meta = tree_map(lambda a: a.detach().to("meta") if isinstance(a, Tensor) else a, given)
        with FlopCounterMode(display=False) as theirs, torch.autocast(device.type, HALF):
            module.reference(*meta)
        for place, (operation, args) in enumerate(recorder.calls):
            if operation not in checked:  # it runs the kernel twice
                torch.library.opcheck(operation, args, test_utils=("test_schema", "test_faketensor"))
                checked.add(operation)
            if not theirs.get_total_flops():
                continue
            assert operation.overloadpacket in flop_registry, f"{operation} has no FLOP formula"
            with FlopCounterMode(display=False) as ours:
                operation(*tree_map(lambda a: a.to("meta") if isinstance(a, Tensor) else a, args))
            assert ours.get_total_flops() > 0
            assert place or ours.get_total_flops() == theirs.get_total_flops()


@pytest.mark.skipif(HERE == "cuda" or INTERPRETED, reason="the kernels run for real, or interpreted")
@pytest.mark.parametrize("name", NAMES)
def test_torch_computes_without_a_gpu(name: str) -> None:
    module = module_of(name)
    for dtype in (HALF, FULL):
        with precision(autocast=dtype is HALF, tf32=False):
            for given in examples(name, dtype):
                assert not module.fits(*given)
                made = getattr(module, name)(*given)
                assert made is None or torch.equal(made, module.reference(*given))


def launch_everything(name: str) -> None:
    """Both passes of all examples of a kernel, or of the synthesis kernels; values are garbage."""
    if name == "synthesis":
        weights = [nn.Parameter(torch.zeros(8, 6)) for _ in range(3)]
        mixture = Mixture(
            previous=weights[0], next=weights[1], correction=weights[2], a=nn.Parameter(torch.ones(1))
        )
        fused.mix(Batch([mixture]), torch.float32)[0].sum().backward()
        return
    module = module_of(name)
    for dtype in (HALF, FULL):
        with precision(autocast=dtype is HALF, tf32=True):
            for given in examples(name, dtype, "cpu"):
                with torch.no_grad():
                    getattr(module, name)(*given)
                for tensor in trained(given):
                    tensor.requires_grad_()
                made = getattr(module, name)(*given)
                if made is not None:
                    made.backward(torch.ones_like(made))


@pytest.mark.skipif(HERE == "cuda" or INTERPRETED, reason="the kernels run for real, or interpreted")
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_and_keeps_its_values_in_registers(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter takes code that its compiler refuses. Nothing is launched."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target, compiled, run = GPUTarget("cuda", capability, 32), {}, JITFunction.run
    gpu = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: capability, get_current_stream=lambda _: 0
    )

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run(self, *args, grid=grid, warmup=True, **options)
        compiled[made.hash] = made
        return made

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(_dispatch, "INTERPRETED", True)  # fits takes tensors on a CPU
    monkeypatch.setattr(driver, "_active", gpu)
    files = [import_module(f"{_triton.__name__}.{name}") for name in TRITON]
    for name in (*NAMES, "synthesis"):
        launch_everything(name)
    found = {name for file in (*files, fused.kernels()) for name, value in vars(file).items()
             if isinstance(value, JITFunction) and name.endswith("_kernel")}  # fmt: skip
    assert {kernel.name for kernel in compiled.values()} == found
    for number, kernel in enumerate(compiled.values()):
        file = tmp_path / f"{number}.cubin"
        file.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        spills = f"{kernel.name} keeps values in memory: {used}"
        assert capability < 90 or re.search(r"\bREG:\d+ STACK:0 ", used), spills
