"""What the benchmarks of single kernels share: candidates run once and checked, timed in turns, and printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from replearn.experiments.bench.timing import interleave

RUNS = 10  # in a graph: a launch alone takes longer than the kernel
Body = Callable[[], Tensor]


def measured(
    candidates: Mapping[str, tuple[Body, Any]],
    error_of: Callable[[Tensor], float],
    device: torch.device,
    *,
    rounds: int,
    check: bool,
) -> list[dict[str, Any]]:
    """A row for each candidate, with its tile: the error of its result, and unless that is all, its time."""
    rows: list[dict[str, Any]] = []
    ready = {}
    for name, (body, tile) in candidates.items():
        row: dict[str, Any] = {"by": name, "tile": tile}
        rows.append(row)
        try:
            row["error"] = error_of(body())
            if not check:
                ready[name] = captured(body, device)
        except RuntimeError as error:  # a tile or a backend that does not fit is a finding too
            row["failed"] = str(error).splitlines()[0]
    runs = RUNS if device.type == "cuda" else 1
    timings = interleave(ready, device, rounds=rounds, warmup=2) if ready else {}
    for row in rows:
        if row["by"] in timings:
            row["microseconds"] = 1000 * timings[row["by"]].median / runs
            found = timings[row["by"]].spread
            row["quartiles"] = [1000 * value / runs for value in (found.low, found.high)]
    return rows


def captured(body: Body, device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return body
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            body()
    return graph.replay


def host_microseconds(body: Body, device: torch.device, calls: int = 100) -> float:
    """The median of what Python takes for one call; the GPU keeps up with what it is given."""
    taken = []
    for _ in range(calls if device.type == "cuda" else 1):
        began = time.perf_counter()
        body()
        taken.append(time.perf_counter() - began)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e6 * sorted(taken)[len(taken) // 2]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.to(exact.dtype) - exact).norm() / exact.norm())


def tell(rows: list[dict[str, Any]]) -> None:
    """Print them, the fastest first; Python's time where there is any."""
    timed_host = any("host" in row for row in rows)
    for row in sorted(rows, key=lambda row: row.get("microseconds", 1e9)):
        took = f"{row['microseconds']:8.1f} us" if "microseconds" in row else " " * 11
        host = f", host {row.get('host', 0):5.1f} us" if timed_host else ""
        said = row.get("failed") or f"error {row['error']:.1e}"
        print(f"{took}{host}  {said}  {row['by']}", flush=True)
