"""One training step: its body, and the body captured as a CUDA graph."""

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ...fast.graphs.capture import WARM_UP, capture_body, on_capture_stream
from ...fast.train.accelerate import accelerate

Body = Callable[[], None]


def step_body(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Callable[[], Iterable[Callable[[], Tensor]]],
    autocast: Callable[[], AbstractContextManager[object]],
    *,
    accelerated: bool = True,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Body:
    """A function that takes one training step; the trainer and the benchmarks run the same.

    `losses` returns a function for each part of the batch, whose losses are averaged. With a `scaler` the loss is
    scaled, and a step whose gradients overflow is skipped.
    """

    def body() -> None:
        optimizer.zero_grad(set_to_none=True)
        parts = list(losses())
        for compute in parts:
            with accelerate(model) if accelerated else nullcontext():
                with autocast():
                    loss = compute()
                loss = loss / len(parts) if len(parts) > 1 else loss
                (loss if scaler is None else scaler.scale(loss)).backward()
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return body


def autocast_for(
    device: torch.device, *, low: bool, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], torch.autocast]:
    """Autocast to `dtype` if `low`; without a cache, whose casts a captured step would reuse in later replays."""
    return lambda: torch.autocast(device.type, dtype, enabled=low, cache_enabled=False)


class CapturedStep:
    """A training step that is captured once and replayed, with a launch of microseconds.

    `body` must read its inputs from fixed tensors and write its results to fixed tensors. Warm-up runs real steps;
    all that they change is restored, random state included, also if the capture fails.
    """

    def __init__(
        self, body: Body, model: nn.Module, optimizer: torch.optim.Optimizer, extra: list[Tensor]
    ) -> None:
        held = [*model.parameters(), *model.buffers(), *extra]
        device = held[0].device
        before = {id(tensor): tensor.detach().clone() for tensor in [*held, *optimizer_tensors(optimizer)]}
        copies = sum(copy.untyped_storage().nbytes() for copy in before.values())
        try:
            with torch.random.fork_rng([device]), on_capture_stream(device):
                for _ in range(WARM_UP):
                    body()
                optimizer.zero_grad(set_to_none=True)
                gc.collect()  # garbage in reference cycles would count
                torch.cuda.reset_peak_memory_stats(device)
                self.launch, _ = capture_body(body, device, torch.cuda.graph_pool_handle())
                # a replay allocates nothing, so this is the only time that the step's memory can be seen; the
                # copies made above are gone afterwards and don't count
                self.peak_memory = torch.cuda.max_memory_allocated(device) - copies
        finally:
            with torch.no_grad():
                for tensor in [*held, *optimizer_tensors(optimizer)]:
                    # state that did not exist before starts at zero, which is where a first step starts too
                    if id(tensor) in before:
                        tensor.copy_(before[id(tensor)])
                    else:
                        tensor.zero_()

    def __call__(self) -> None:
        self.launch()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


GRAPHS = 256  # of one forward's code; torch's own limit of 8 is used up by a few methods, batches and models


def many_graphs() -> AbstractContextManager[None]:
    """Raise torch.compile's recompilation limit.

    Beyond it later models run eagerly, with one line in the log: some rows of a table would not be compiled.
    """
    from torch._dynamo import config

    limit = max(GRAPHS, config.recompile_limit)
    return config.patch(recompile_limit=limit, accumulated_recompile_limit=8 * GRAPHS)


def not_compiled(compiled: bool) -> AbstractContextManager[object]:
    """Run compiled models eagerly: an evaluation has other shapes, each of which would be compiled."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
