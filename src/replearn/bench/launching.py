"""What a GPU is given in one run, and how long Python takes to give it: whether a row waits for Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import Body

RUNS = 15


def launched(bodies: Mapping[str, Body], device: torch.device) -> dict[str, dict[str, float]]:
    """Kernels (copies and fills too) of a run of each, and the milliseconds after which Python has launched them.

    Nothing on a CPU, which computes while it is asked.
    """
    if device.type != "cuda":
        return {}
    return {
        "launched": {name: launches(body, device) for name, body in bodies.items()},
        "launching": {name: host_milliseconds(body, device) for name, body in bodies.items()},
    }


def launches(body: Body, device: torch.device) -> int:
    body()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        body()
        torch.cuda.synchronize(device)
    return sum(event.device_type.name == "CUDA" for event in found.events())


def host_milliseconds(body: Body, device: torch.device) -> float:
    """From an idle device, so that no full queue holds Python up; the median of some runs."""
    found = []
    for _ in range(RUNS):
        body()  # as where times are taken
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        body()
        found.append(1000 * (time.perf_counter() - begin))
        torch.cuda.synchronize(device)
    return statistics.median(found)
