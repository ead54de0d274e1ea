"""Every Triton kernel compiles for real GPUs, on a machine that has none: nothing is launched.

Triton's interpreter, which the other tests run kernels in, takes code that its compiler refuses. Here each launch
goes as far as machine code, for the sizes that models have and the tiles in use.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreting import HERE, INTERPRETED
from torch import Tensor

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import replearn
from replearn.fast.kernels import _launch_cache as launch_cache
from replearn.fast.kernels._triton import attention_short as short
from replearn.fast.kernels._triton import attention_short_tiles as short_tiles
from replearn.fast.kernels._triton import bn_add_relu as normed
from replearn.fast.kernels._triton import conv1x1_bn_expand as expanding
from replearn.fast.kernels._triton import conv1x1_bn_reduce as narrowing
from replearn.fast.kernels._triton import conv3x3_small as narrow
from replearn.fast.kernels._triton import conv3x3_small_tiles as narrow_tiles
from replearn.fast.kernels._triton import conv3x3_small_wgrad as weight_kernels
from replearn.fast.kernels._triton import layernorm_half as norms
from replearn.fast.kernels._triton import linear_residual as residual
from replearn.fast.kernels._triton import patch_embed as patches
from replearn.fast.kernels._triton import reduced_bottleneck as closing
from replearn.fast.kernels._triton import stem
from replearn.fast.kernels._triton.linear_residual_tiles import tile_for as residual_tile
from replearn.fast.kernels._triton.running_statistics import Running
from replearn.fast.kernels._triton.stem_tiles import walk_for
from replearn.fast.synthesis import _triton as mixing

pytestmark = pytest.mark.skipif(HERE == "cuda" or INTERPRETED, reason="the kernels run for real, or interpreted")
HALF, SINGLE = torch.float16, torch.float32


class Forgetful(dict[Any, Any]):
    """Keeps no compiled kernel to launch again."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was compiled meanwhile, for GPUs of this compute capability."""
    target, found, run = GPUTarget("cuda", capability, 32), [], JITFunction.run
    gpu = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: capability, get_current_stream=lambda _: 0
    )

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **options))
        return found[-1]

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch_cache, "_compiled", Forgetful())
    before = driver._active
    driver.set_active(gpu)
    yield found
    driver._active = before


def of(*shape: int, dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def layer(rows: int, inner: int, dtype: torch.dtype, branched: bool) -> None:
    branch = of(384, 384, dtype=dtype) if branched else None
    u, h, weight, bias = (
        of(rows, 384, dtype=SINGLE),
        of(rows, inner, dtype=dtype),
        of(384, inner, dtype=dtype),
        of(384),
    )
    tile = residual_tile(rows, inner, 384, branched=branched)
    residual.launch(u, h, weight, bias, branch, torch.empty_like(u), tile)


def embedding(images: int, last: bool) -> None:
    pictures = of(images, 3, 224, 224, dtype=SINGLE, last=last)
    patches.launch(pictures, of(384, 3, 16, 16), of(197, 384, dtype=SINGLE), 1, of(images, 197, 384, dtype=SINGLE))


def attention(tokens: int, causal: bool) -> None:
    qkv, out = of(8, tokens, 3 * 192, dtype=torch.bfloat16), of(8, tokens, 192, dtype=torch.bfloat16)
    forward, back = (short_tiles.tile_for(t, tokens, 64) for t in (short_tiles.FORWARD, short_tiles.BACKWARD))
    short.launch_attend(qkv, out, 3, causal, forward)
    short.launch_attend_back(qkv, out, torch.empty_like(qkv), 3, causal, back)


def convolution(cin: int, cout: int) -> None:
    x, out = (of(64, channels, 32, 32, dtype=torch.bfloat16, last=True) for channels in (cin, cout))
    weight = of(cout, cin, 3, 3, dtype=SINGLE, last=True)
    narrow.launch_convolve(x, weight, out, False, narrow_tiles.tile_for(cin, cout))
    partials = weight_kernels.launch_weight(x, out, narrow_tiles.weight_tile_for(cin, cout))
    weight_kernels.launch_sum(partials)
    if cin > 3:
        narrow.launch_convolve(out, weight, x, True, narrow_tiles.tile_for(cout, cin))


def synthesis(source: torch.dtype, sources: bool, corrections: bool) -> None:
    tables = of(3, mixing.FIELDS, dtype=torch.int64), of(3, dtype=SINGLE), of(64, 2, dtype=torch.int32)
    numbers = of(64 * 576, dtype=source)
    room = (numbers if sources else numbers[:0], numbers if corrections else numbers[:0])
    mixing.launch_forward(tables, numbers, source, 1024)
    mixing.launch_backward(tables, numbers, of(2 * 64, dtype=SINGLE), *room, source, 1024)


def expansion() -> None:
    weight, spread, centre, gamma = (
        of(256, 64),
        of(64, 64, dtype=SINGLE),
        of(64, dtype=SINGLE),
        of(256, dtype=SINGLE),
    )
    running = Running((gamma, gamma, of(dtype=torch.int64)), 0.1, 1.01)
    expanding.fold_norm(weight, spread, centre, gamma, gamma, 1e-5, HALF, running)
    wide = of(256, 64, dtype=SINGLE)
    expanding.norm_grads(weight, wide, gamma, of(4, 256, dtype=SINGLE), 1000, centre, wide, HALF)
    x = of(1000, 256, dtype=torch.bfloat16)
    for inner in (64, 256):
        z, scaled, shift = (of(*shape, dtype=torch.bfloat16) for shape in ((1000, inner), (256, inner), (256,)))
        closing.launch(x, z, scaled, shift, torch.empty_like(x))
    for inner in (64, 128, 512):
        shapes = (1000, inner), (256, inner), (inner, inner), (inner,)
        z, *given = (of(*shape, dtype=torch.bfloat16) for shape in shapes)
        narrowing.launch(x, z, *given, torch.empty_like(z), masked=inner != 128)


def norm_and_relu(channels: int, size: int, dtype: torch.dtype, added: bool) -> None:
    x = of(128, channels, size, size, dtype=dtype, last=True)
    per_channel, numbers = of(channels, dtype=SINGLE), of(4, channels, dtype=SINGLE)
    running = Running((per_channel, per_channel, of(dtype=torch.int64)), 0.1, 1.01)
    arrivals, other = of(64, dtype=torch.int32), x if added else None
    normed.launch_statistics(x, (per_channel, per_channel), running, arrivals, numbers, 1e-5)
    normed.launch_apply(x, other, numbers, x)
    factors = normed.launch_affine_grads(
        x, other, x, other, numbers, other, of(2, channels, dtype=SINGLE), arrivals
    )
    normed.launch_input_grad(x, x, numbers, factors, x, passed=added)
    normed.launch_relu_backward(x, other, x, x, per_channel, arrivals)


def first_layers(dtype: torch.dtype, last: bool) -> None:
    framed = of(64, 229, 240, 4, dtype=dtype)
    images, packed = of(64, 3, 224, 224, dtype=SINGLE, last=last), of(64, 7, 32, dtype=dtype)
    stem.launch_pad(images, of(64, 3, 7, 7, dtype=dtype, last=last), framed, packed, 3)
    out = of(64, 64, 56, 56, dtype=dtype, last=last)
    bias = of(64, dtype=SINGLE)
    for batch in (64, 32, 3):  # shorter walks for fewer images
        stem.launch_convolve_and_pool(framed, packed, bias, out, (112, 112), 2, last, walk_for(batch, 56, 56))


LAUNCHES: dict[str, Callable[[], None]] = {
    "a layer, few rows": lambda: layer(197, 1536, HALF, False),
    "a layer, many rows": lambda: layer(6304, 384, torch.bfloat16, False),
    "a layer with a branch, few rows": lambda: layer(197, 1536, HALF, True),
    "a layer with a branch, many rows": lambda: layer(12608, 1536, HALF, True),
    "patches of one image": lambda: embedding(1, True),
    "patches of many images": lambda: embedding(64, False),
    "norms": lambda: norms.launch(of(197, 384, dtype=SINGLE), of(384), of(384), 1e-6, of(197, 384)),
    "attention, 17 tokens": lambda: attention(17, False),
    "attention, 64 tokens": lambda: attention(64, True),
    "convolutions of images": lambda: convolution(3, 16),
    "convolutions, 16 channels": lambda: convolution(16, 16),
    "convolutions, 16 to 32 channels": lambda: convolution(16, 32),
    "convolutions, 32 channels": lambda: convolution(32, 32),
    "convolutions, 64 channels": lambda: convolution(64, 64),
    "synthesis": lambda: synthesis(SINGLE, True, True),
    "synthesis in half precision, sources kept": lambda: synthesis(torch.bfloat16, False, False),
    "expansion": expansion,
    "a norm and a ReLU, 16 channels": lambda: norm_and_relu(16, 32, torch.bfloat16, False),
    "a norm, a sum and a ReLU, 256 channels": lambda: norm_and_relu(256, 56, torch.bfloat16, True),
    "a norm, a sum and a ReLU in float32": lambda: norm_and_relu(48, 56, SINGLE, True),
    "a stem in half precision": lambda: first_layers(HALF, True),
    "a stem in TF32": lambda: first_layers(SINGLE, False),
}


OLDER = ("a layer with a branch, few rows", "patches of one image", "norms", "attention, 64 tokens",
         "convolutions, 32 channels", "synthesis", "expansion", "a stem in half precision",
         "a norm, a sum and a ReLU, 256 channels")  # fmt: skip


@pytest.mark.parametrize("capability", [90])
@pytest.mark.parametrize("name", LAUNCHES)
def test_it_compiles_and_keeps_its_numbers_in_registers(name: str, compiled: list[Any], tmp_path: Path) -> None:
    LAUNCHES[name]()
    assert compiled
    for number, kernel in enumerate(compiled):
        file = tmp_path / f"{number}.cubin"
        file.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.search(r"\bREG:\d+ STACK:0 ", used), f"{kernel.name} keeps numbers in memory: {used}"


@pytest.mark.parametrize("capability", [80])
@pytest.mark.parametrize("name", OLDER)
def test_it_compiles_for_an_older_gpu(name: str, compiled: list[Any]) -> None:
    LAUNCHES[name]()
    assert compiled
    assert all(kernel.asm["cubin"] for kernel in compiled)


def test_no_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: launched.add(self.__name__))
    monkeypatch.setattr(launch_cache, "_compiled", Forgetful())
    for launch in LAUNCHES.values():
        launch()
    modules = (
        *(narrow, weight_kernels, norms, normed, closing, expanding, mixing, narrowing, patches, residual, short),
        stem,
    )
    named = {name for module in modules for name, value in vars(module).items() if isinstance(value, JITFunction)}
    assert launched == {name for name in named if name.endswith("_kernel")}
    sources = Path(replearn.__file__).parent.rglob("*.py")
    rooms = {path.parent.name for path in sources if "triton.jit" in path.read_text(encoding="utf-8")}
    assert rooms == {module.__name__.split(".")[-2] for module in modules}
