"""How long Python takes to launch one run on a GPU: whether a row waits for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from .timing import Body


def launching(bodies: Mapping[str, Body], device: torch.device, runs: int = 15) -> dict[str, float]:
    """The milliseconds after which Python has launched a run of each; on a CPU, which computes meanwhile, none."""
    if device.type != "cuda":
        return {}
    return {name: host_milliseconds(body, device, runs) for name, body in bodies.items()}


def host_milliseconds(body: Body, device: torch.device, runs: int) -> float:
    """From an idle device, so that no full queue holds Python up; the median of some runs."""
    found = []
    for _ in range(runs):
        body()  # as where times are taken
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        body()
        found.append(1000 * (time.perf_counter() - begin))
        torch.cuda.synchronize(device)
    return statistics.median(found)
