"""Machines as data: how fast they compute, move memory and start kernels; by name, or measured once."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ReplearnError
from ..planning.serialization import decode, encode, parse
from .precision import float32_products

if TYPE_CHECKING:
    from .recorder import Operation


@dataclass(frozen=True, slots=True)
class Machine:
    """What a roofline needs of a machine, as training reaches it and not as the data sheet has it.

    FLOPs a second in 16 bits, in float32 through tensor cores (TF32) and in plain float32; bytes a second; and the
    seconds that starting one kernel costs.
    """

    name: str
    half_flops: float
    tf32_flops: float
    float32_flops: float
    bandwidth: float
    launch: float
    source: str


# Dense peaks and bandwidths in tera, as the makers' data sheets have them (SXM if there is a choice, no sparsity),
# written from memory and not looked up again: 16 bits with float32 accumulation, TF32, float32, memory. A GPU
# without TF32 computes such work in float32. Ratios for the H200 are compared with measured ones in
# benchmarks/results/predicted_steps.json; where a number matters, probe your machine.
DATA_SHEETS = {
    "B200": (2250.0, 1125.0, 80.0, 8.0),
    "H200": (989.0, 494.5, 67.0, 4.8),
    "H100": (989.0, 494.5, 67.0, 3.35),
    "A100": (312.0, 156.0, 19.5, 2.039),
    "L40S": (362.0, 183.0, 91.6, 0.864),
    "L4": (121.0, 60.0, 30.3, 0.3),
    "A10": (125.0, 62.5, 31.2, 0.6),
    "RTX 4090": (165.2, 82.6, 82.6, 1.008),
    "RTX 3090": (71.0, 35.6, 35.6, 0.936),
    "V100": (125.0, 15.7, 15.7, 0.9),
    "T4": (65.0, 8.1, 8.1, 0.32),
}
# The share of the data sheet that large matrix products and copies reach, and the cost of an eager kernel. They
# are round numbers, not measured on each GPU: where seconds count, not ratios, use `probe` on the machine itself.
REACHED_FLOPS, REACHED_BANDWIDTH, EAGER_LAUNCH = 0.6, 0.8, 5e-6


def named_machine(name: str) -> Machine:
    """A GPU by name, from its data sheet (from memory: where seconds count, `probe` your machine).

    >>> named_machine("rtx4090").name
    'RTX 4090'
    """
    wanted = _plain(name)
    for known, (half, tf32, single, memory) in DATA_SHEETS.items():
        if wanted in (_plain(known), _plain(known.split()[-1])):
            return Machine(
                name=known,
                half_flops=half * REACHED_FLOPS * 1e12,
                tf32_flops=tf32 * REACHED_FLOPS * 1e12,
                float32_flops=single * REACHED_FLOPS * 1e12,
                bandwidth=memory * REACHED_BANDWIDTH * 1e12,
                launch=EAGER_LAUNCH,
                source=SHEET,
            )
    raise ReplearnError(
        f"There is no GPU {name!r} in the table; there are {', '.join(DATA_SHEETS)}. On the machine itself, probe "
        "it instead: --probe, or replearn.costs.probe()."
    )


SHEET = f"data sheet, {REACHED_FLOPS:.0%} of its FLOPs and {REACHED_BANDWIDTH:.0%} of its bandwidth"


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def seconds_of(operation: Operation, machine: Machine, precision: str) -> float:
    """The roofline: computing or moving, whichever is slower, and the start of the kernel."""
    if operation.dtype in (torch.float16, torch.bfloat16):
        peak = machine.half_flops
    elif precision == "tf32" or "convolution" in operation.name:  # torch lets cuDNN use TF32 unless told not to
        peak = machine.tf32_flops
    else:
        peak = machine.float32_flops
    return max(operation.flops / peak, operation.bytes_moved / machine.bandwidth) + machine.launch


FORMAT = 1
SECONDS = 2.0  # for each of the measurements
SIZES = {"cuda": (8192, 256, 2**29), "cpu": (1024, 8, 2**26)}  # matrix rows, images, bytes to copy


def probe(device: str | torch.device | None = None) -> Machine:
    """This machine's speeds, measured in less than 20 seconds and remembered in the user's cache folder.

    The cache is one JSON file for each device and version of torch. A damaged file is measured over.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in SIZES:
        raise ReplearnError(f"Only cpu and cuda can be probed, not {str(where)!r}; name a GPU instead.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ReplearnError("There is no CUDA GPU here to probe; name one instead, as named_machine('H100').")
    name = f"CPU ({torch.get_num_threads()} threads)"
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replearn"
    file = folder / f"machine-{FORMAT}-{_plain(f'{platform.node()} {name} {torch.__version__}')}.json"
    if (found := _remembered(file)) is None:
        found = measure(where, name, SECONDS)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"replearn_machine": FORMAT, **encode(found)}), encoding="utf-8")
        temporary.replace(file)
    return found


def measure(device: torch.device, name: str, seconds: float) -> Machine:
    """Six small measurements of this many seconds each."""
    rows, images, copied = SIZES[device.type]

    def fastest(dtype: torch.dtype) -> float:
        return max(_matmul(device, dtype, rows, seconds), _convolution(device, dtype, images, seconds))

    with float32_products(tf32=False):
        single = _matmul(device, torch.float32, rows, seconds)
    with float32_products(tf32=True):
        fast = fastest(torch.float32)
    half = fastest(torch.bfloat16)
    memory = torch.empty(copied // 4, device=device)
    target = torch.empty_like(memory)
    bandwidth = 2 * copied / _each(lambda: target.copy_(memory), seconds)
    small = torch.zeros(16, device=device)
    launch = _each(lambda: small.add_(1), min(seconds, 0.5))
    return Machine(
        name, half, max(fast, single), single, bandwidth, launch, f"probed with torch {torch.__version__}"
    )


def _matmul(device: torch.device, dtype: torch.dtype, rows: int, seconds: float) -> float:
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    return 2 * rows**3 / _each(lambda: left @ right, seconds)


def _convolution(device: torch.device, dtype: torch.dtype, images: int, seconds: float) -> float:
    given = torch.randn(images, 128, 28, 28, device=device).to(dtype).to(memory_format=torch.channels_last)
    kernel = torch.randn(128, 128, 3, 3, device=device).to(dtype)
    work = 2 * images * 28 * 28 * 128 * 128 * 9
    return work / _each(lambda: torch.nn.functional.conv2d(given, kernel, padding=1), seconds)


@torch.no_grad()
def _each(work: Callable[[], Tensor], seconds: float) -> float:
    """Seconds of one call: the best of many runs."""
    from torch.utils.benchmark import Timer  # slow to import

    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=seconds).times)


def _remembered(file: Path) -> Machine | None:
    try:
        data = parse(file.read_text(encoding="utf-8"), "it")
        if not isinstance(data, dict) or data.pop("replearn_machine", None) != FORMAT:
            return None
        machine = decode(Machine, data, "machine")
    except (OSError, ValueError):  # absent, unreadable or damaged: all are mended by measuring
        return None
    return machine if min(machine.half_flops, machine.float32_flops, machine.bandwidth) > 0 else None
