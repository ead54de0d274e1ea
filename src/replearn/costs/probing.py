"""Measure this machine once, and remember: how fast it multiplies, convolves, copies and starts kernels."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ReplearnError
from ..planning.serialization import decode, encode, parse
from .machines import Machine
from .precision import float32_products

FORMAT = 1
SECONDS = 2.0  # for each of the measurements
SIZES = {"cuda": (8192, 256, 2**29), "cpu": (1024, 8, 2**26)}  # matrix rows, images, bytes to copy


def probe(device: str | torch.device | None = None, *, again: bool = False) -> Machine:
    """This machine's speeds, measured in less than 20 seconds and remembered in the user's cache folder.

    The cache is one JSON file for each device and version of torch; `again=True` measures anew. A damaged file
    is measured over.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in SIZES:
        raise ReplearnError(f"Only cpu and cuda can be probed, not {str(where)!r}; name a GPU instead.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ReplearnError("There is no CUDA GPU here to probe; name one instead, as named_machine('H100').")
    name = (
        torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"
    )
    file = cache_folder() / f"machine-{FORMAT}-{_slug(f'{platform.node()} {name} {torch.__version__}')}.json"
    found = None if again else _remembered(file)
    if found is None:
        found = measure(where, name, SECONDS)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"replearn_machine": FORMAT, **encode(found)}), encoding="utf-8")
        temporary.replace(file)
    return found


def measure(device: torch.device, name: str, seconds: float) -> Machine:
    """Six small measurements of this many seconds each."""
    rows, images, copied = SIZES[device.type]
    with float32_products(tf32=False):
        single = _matmul(device, torch.float32, rows, seconds)
    with float32_products(tf32=True):
        fast = max(
            _matmul(device, torch.float32, rows, seconds), _convolution(device, torch.float32, images, seconds)
        )
    half = max(
        _matmul(device, torch.bfloat16, rows, seconds), _convolution(device, torch.bfloat16, images, seconds)
    )
    memory = torch.empty(copied // 4, device=device)
    target = torch.empty_like(memory)
    bandwidth = 2 * copied / _each(lambda: target.copy_(memory), device, seconds)
    small = torch.zeros(16, device=device)
    launch = _each(lambda: small.add_(1), device, min(seconds, 0.5))
    return Machine(
        name, half, max(fast, single), single, bandwidth, launch, f"probed with torch {torch.__version__}"
    )


def _matmul(device: torch.device, dtype: torch.dtype, rows: int, seconds: float) -> float:
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    return 2 * rows**3 / _each(lambda: left @ right, device, seconds)


def _convolution(device: torch.device, dtype: torch.dtype, images: int, seconds: float) -> float:
    given = torch.randn(images, 128, 28, 28, device=device).to(dtype).to(memory_format=torch.channels_last)
    kernel = torch.randn(128, 128, 3, 3, device=device).to(dtype)
    work = 2 * images * 28 * 28 * 128 * 128 * 9
    return work / _each(lambda: torch.nn.functional.conv2d(given, kernel, padding=1), device, seconds)


@torch.no_grad()
def _each(work: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """Seconds of one call: in growing runs until the time is up, the best run counts."""

    def timed(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / times

    timed(1)  # the first call sets things up
    times, best, end = 1, float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, timed(times))
        times = max(1, min(times * 2, int(seconds / 8 / best)))
    return best


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    if found := os.environ.get("XDG_CACHE_HOME"):
        return Path(found) / "replearn"
    if os.name == "nt" and (found := os.environ.get("LOCALAPPDATA")):
        return Path(found) / "replearn"
    return Path.home() / ".cache" / "replearn"


def _remembered(file: Path) -> Machine | None:
    try:
        data = parse(file.read_text(encoding="utf-8"), "it")
        if not isinstance(data, dict) or data.pop("replearn_machine", None) != FORMAT:
            return None
        machine: Machine = decode(Machine, data, "machine")
    except (OSError, ValueError):  # absent, unreadable or damaged: all are mended by measuring
        return None
    return machine if min(machine.half_flops, machine.float32_flops, machine.bandwidth) > 0 else None


def _slug(text: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in text.lower())
