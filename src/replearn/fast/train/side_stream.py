"""Work that is waited for late, on a stream beside the one that a step is recorded on.

A GPU takes kernels of two streams at a time. Where one of them ends, and fills fewer and fewer of the processors,
or waits for memory, another can begin. So what nobody needs for a while, as the gradient of a weight, goes beside.
Whoever reads it calls `wait` first; that is what a gate is for, through which a step's weights go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")
_sides: dict[tuple[torch.device, int], Side] = {}  # by the stream that they are beside


class Side:
    """The stream beside another, and what runs on it now."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.ends: torch.cuda.Event | None = None
        self.kept: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        """Let the current stream wait for what runs here; what that reads may go."""
        if self.ends is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.ends)
        self.forget()

    def forget(self) -> None:
        self.ends, self.kept = None, ()


def beside(work: Callable[[], Made], *read: Tensor, further: bool = False) -> Made:
    """Do something beside the current stream, after all that this has to do so far; `wait` before reading it.

    The tensors that it reads are kept until then: their memory must not be used for others meanwhile. That is why
    there is one piece of work at a time, and the current stream waits for the last one, unless this is `further`
    work on what that gives.
    """
    if not read[0].is_cuda:
        return work()
    side = side_of(read[0].device)
    if not further:
        side.wait()
    side.stream.wait_stream(torch.cuda.current_stream(side.stream.device))
    with torch.cuda.stream(side.stream):
        made = work()
    side.ends, side.kept = side.stream.record_event(), (*side.kept, *read)
    return made


def wait(device: torch.device) -> None:
    """Let the current stream wait for what runs beside it."""
    if device.type == "cuda" and (side := _sides.get(key_of(device))) is not None:
        side.wait()


def forget(device: torch.device) -> None:
    """Wait for nothing: a recording broke off, and what it had begun is not there."""
    if device.type == "cuda" and (side := _sides.get(key_of(device))) is not None:
        side.forget()


def side_of(device: torch.device) -> Side:
    key = key_of(device)
    if key not in _sides:
        _sides[key] = Side(device)
    return _sides[key]


def key_of(device: torch.device) -> tuple[torch.device, int]:
    return device, stream_of(device)


class Uses:
    """How many computations a tensor was used in: the gradients of two are added by autograd, which can't wait.

    And the stream that its gate is on, beside which they may be computed.
    """

    def __init__(self, stream: int) -> None:
        self.count, self.stream = 0, stream

    @property
    def alone(self) -> bool:
        return self.count == 1


def may_come_late(tensors: Iterable[Tensor]) -> None:
    """Say of tensors that came through a gate, and that nobody knows yet, that their gradients may come late."""
    for tensor in tensors:
        tensor._uses = Uses(stream_of(tensor.device))  # type: ignore[attr-defined]


def used(tensor: Tensor) -> Uses | None:
    """Note that something is computed with a tensor whose gradient may come late; None if it may not."""
    uses: Uses | None = getattr(tensor, "_uses", None)
    if uses is not None:
        uses.count += 1
    return uses


def stands_for(stand_in: Tensor | None, tensor: Tensor) -> bool:
    """Whether that is the same tensor behind a gate, still, and the gate is on this stream."""
    uses: Uses | None = getattr(stand_in, "_uses", None)
    return (
        stand_in is not None
        and uses is not None
        and stand_in.requires_grad is tensor.requires_grad
        and stand_in.data_ptr() == tensor.data_ptr()
        and stand_in.shape == tensor.shape
        and steps_of(stand_in) == steps_of(tensor)
        and uses.stream == stream_of(tensor.device)
    )


def steps_of(tensor: Tensor) -> list[int]:
    """Strides, where they count: a view may have others where there is one number."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
