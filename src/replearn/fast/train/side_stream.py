"""A side stream for work that is needed late, as weight gradients in a captured training step.

Kernels of two streams run at a time. Where one kernel ends and leaves multiprocessors idle, or waits for memory,
another can start. Readers of the result call `wait_for_side_stream` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_side_streams: dict[tuple[torch.device, int], SideStream] = {}  # by the main stream


class SideStream:
    """A stream beside a main stream, the end of what runs on it, and the tensors that this reads."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.end: torch.cuda.Event | None = None
        self.kept: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        """Let the current stream wait; then the tensors that were read may be freed."""
        if self.end is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.end)
        self.reset()

    def reset(self) -> None:
        self.end, self.kept = None, ()


def run_on_side_stream(work: Callable[[], Result], *read: Tensor, after_last: bool = False) -> Result:
    """Run work on the side stream of the current one, after all that this has launched so far.

    The tensors that it reads are kept until the current stream has waited, since their memory must not be reused
    meanwhile. So there is one piece of work at a time: the current stream waits for the last one first, unless
    this work reads its result (`after_last`).
    """
    if not read[0].is_cuda:
        return work()
    side = _side_stream_of(read[0].device)
    if not after_last:
        side.wait()
    side.stream.wait_stream(torch.cuda.current_stream(side.stream.device))
    with torch.cuda.stream(side.stream):
        made = work()
    side.end, side.kept = side.stream.record_event(), (*side.kept, *read)
    return made


def wait_for_side_stream(device: torch.device) -> None:
    """Let the current stream wait for its side stream."""
    if device.type == "cuda" and (side := _side_streams.get((device, stream_id(device)))) is not None:
        side.wait()


def reset_side_stream(device: torch.device) -> None:
    """Drop pending work: a capture failed, and its events can't be waited for."""
    if device.type == "cuda" and (side := _side_streams.get((device, stream_id(device)))) is not None:
        side.reset()


def _side_stream_of(device: torch.device) -> SideStream:
    key = device, stream_id(device)
    if key not in _side_streams:
        _side_streams[key] = SideStream(device)
    return _side_streams[key]


class UseCount:
    """In how many computations a gated tensor was used, and the stream of its gate.

    Autograd adds the gradients of two uses before the gate has waited, so only a single one may be overlapped.
    """

    def __init__(self, stream: int) -> None:
        self.count, self.stream = 0, stream

    @property
    def single(self) -> bool:
        return self.count == 1


def mark_overlappable(tensors: Iterable[Tensor]) -> None:
    """Mark new outputs of a gate as tensors whose gradients may be computed on the side stream."""
    for tensor in tensors:
        tensor._overlap_uses = UseCount(stream_id(tensor.device))  # type: ignore[attr-defined]


def count_use(tensor: Tensor) -> UseCount | None:
    """Count a computation with an overlappable tensor; None for other tensors."""
    uses: UseCount | None = getattr(tensor, "_overlap_uses", None)
    if uses is not None:
        uses.count += 1
    return uses


def is_gated_alias(alias: Tensor | None, tensor: Tensor) -> bool:
    """True if `alias` is still the same tensor behind a gate on this stream."""
    uses: UseCount | None = getattr(alias, "_overlap_uses", None)
    return (
        alias is not None
        and uses is not None
        and alias.requires_grad is tensor.requires_grad
        and alias.data_ptr() == tensor.data_ptr()
        and alias.shape == tensor.shape
        and _relevant_strides(alias) == _relevant_strides(tensor)
        and uses.stream == stream_id(tensor.device)
    )


def _relevant_strides(tensor: Tensor) -> list[int]:
    """Strides of dimensions longer than one: a view may have others elsewhere."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def stream_id(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
