"""Latency of deployed models, measured in turns so that a busy machine treats them alike.

Every model has its BatchNorms folded into convolutions first, by torch.fx, whoever made it. On a CPU with one
thread the clock is that of the process, since others may hold the core; on a GPU forward passes are CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse


@torch.no_grad()
def interleaved(models: Sequence[nn.Module], batch: Tensor, rounds: int = 9) -> list[float]:
    """The least milliseconds of each model's forward pass over some turns."""
    ready = [deployed(model) for model in models]
    calls: list[Callable[[], object]] = [partial(model, batch) for model in ready]
    if batch.is_cuda:
        try:
            calls = [replayed(model, batch) for model in ready]
        except RuntimeError as error:  # all of them are timed alike
            print(f"timed without CUDA graphs: {error}", flush=True)
    for call in calls:
        call()
    turns = [[timed(call, batch.is_cuda) for call in calls] for _ in range(rounds)]
    return [1e3 * min(turn[at] for turn in turns) for at in range(len(calls))]


def deployed(model: nn.Module) -> nn.Module:
    """A copy with BatchNorm folded, where there is some."""
    return fuse(model) if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) else model


def timed(call: Callable[[], object], cuda: bool) -> float:
    alone = not cuda and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    if cuda:
        torch.cuda.synchronize()
    begin = clock()
    call()
    if cuda:
        torch.cuda.synchronize()
    return clock() - begin


def replayed(model: nn.Module, batch: Tensor) -> Callable[[], object]:
    """A call that replays the forward pass, so that kernels count and not the time to launch them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(batch)
    return graph.replay
