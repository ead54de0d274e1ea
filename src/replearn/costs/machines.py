"""Machines as data: FLOPs, bandwidth and launch time, from a data sheet or measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ReplearnError
from .precision import float32_products

if TYPE_CHECKING:
    from .recorder import Operation


@dataclass(frozen=True, slots=True)
class Machine:
    """What a roofline needs of a machine: rates that training reaches, not the peaks of the data sheet.

    FLOPs per second in 16 bits, in TF32 and in float32; bytes per second; and seconds per kernel launch.
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
    """The roofline: the slower of computing and moving, plus the launch."""
    if operation.dtype in (torch.float16, torch.bfloat16):
        peak = machine.half_flops
    elif precision == "tf32" or "convolution" in operation.name:  # torch lets cuDNN use TF32 unless told not to
        peak = machine.tf32_flops
    else:
        peak = machine.float32_flops
    return max(operation.flops / peak, operation.bytes_moved / machine.bandwidth) + machine.launch


SECONDS = 1.0  # for each of the measurements
SIZES = {"cuda": (8192, 256, 2**29), "cpu": (1024, 8, 2**26)}  # matrix rows, images, bytes to copy


def probe(device: str | torch.device | None = None) -> Machine:
    """Measure this machine, in six runs of a second each."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in SIZES:
        raise ReplearnError(f"Only cpu and cuda can be probed, not {str(where)!r}; name a GPU instead.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ReplearnError("There is no CUDA GPU here to probe; name one instead, as named_machine('H100').")
    name = f"CPU ({torch.get_num_threads()} threads)"
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
    rows, images, copied = SIZES[where.type]

    def fastest(dtype: torch.dtype) -> float:
        return max(_matmul(where, dtype, rows), _convolution(where, dtype, images))

    with float32_products(tf32=False):
        single = _matmul(where, torch.float32, rows)
    with float32_products(tf32=True):
        fast = fastest(torch.float32)
    half = fastest(torch.bfloat16)
    memory, small = torch.empty(copied // 4, device=where), torch.zeros(16, device=where)
    target = torch.empty_like(memory)
    bandwidth = 2 * copied / _fastest_seconds(lambda: target.copy_(memory))
    launch = _fastest_seconds(lambda: small.add_(1))
    source = f"probed with torch {torch.__version__}"
    return Machine(name, half, max(fast, single), single, bandwidth, launch, source)


def _matmul(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    return 2 * rows**3 / _fastest_seconds(lambda: left @ right)


def _convolution(device: torch.device, dtype: torch.dtype, images: int) -> float:
    given = torch.randn(images, 128, 28, 28, device=device).to(dtype).to(memory_format=torch.channels_last)
    kernel = torch.randn(128, 128, 3, 3, device=device).to(dtype)
    work = 2 * images * 28 * 28 * 128 * 128 * 9
    return work / _fastest_seconds(lambda: torch.nn.functional.conv2d(given, kernel, padding=1))


@torch.no_grad()
def _fastest_seconds(work: Callable[[], Tensor]) -> float:
    """Seconds of one call: the best of many runs."""
    from torch.utils.benchmark import Timer  # slow to import

    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=SECONDS).times)
