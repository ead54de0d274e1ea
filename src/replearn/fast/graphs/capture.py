"""Capture CUDA graphs, and recover from captures that fail."""

from __future__ import annotations

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ReplearnError, class_and_line
from ..verify import tensors_in

aten = torch.ops.aten
# data-dependent output shapes, which synchronize
SIZED_BY_VALUES = {
    *(aten.nonzero, aten.masked_select, aten.bincount, aten.unique_dim, aten.unique_consecutive),
    *(aten.unique_dim_consecutive, aten._unique, aten._unique2),
}
WARM_UP = 3  # runs, in which cuDNN and Triton choose kernels and compilers compile
_capture_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and main stream
_alone = threading.RLock()  # one capture at a time
_failed: list[torch.cuda.CUDAGraph] = []  # never freed: the allocator may still point at them

Launch = Callable[[], None]


def capture(name: str, body: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Launch, Any]:
    """Warm `body` up, capture it, and return the replay function and the static outputs.

    Raises ReplearnError, which names the model, for code that synchronizes or that torch can't capture.
    """
    if device.type != "cuda":
        raise ReplearnError(
            f"{name} is on {device}, and only what runs on a CUDA GPU can be replayed as a CUDA graph. Move it: "
            ".to('cuda'); on this device run what deploy or streamline give without graph=True."
        )
    with on_capture_stream(device):
        for _ in range(WARM_UP - 1):
            body()
        refuse_synchronizing(name, body, device)
        try:
            return capture_body(body, device, pool)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise uncapturable(name, class_and_line(error)) from error


class Turns:
    """Orders streams that use the same memory: each waits for the one before it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: torch.cuda.Stream | None = None

    def take(self, device: torch.device) -> None:
        if device.type == "cuda":
            now = torch.cuda.current_stream(device)
            if self.last is not None and now != self.last:
                now.wait_stream(self.last)
            self.last = now


class _Thread(threading.local):
    capturing = False


_thread = _Thread()
_turns: defaultdict[torch.cuda.Stream, Turns] = defaultdict(Turns)  # by capture stream


def is_capturing_here() -> bool:
    """True while this thread warms up or captures, or the current stream is captured."""
    return _thread.capturing or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    """Run on the capture stream of the current stream, which waits for it and is waited for.

    Every stream has one capture stream, since cuBLAS keeps a workspace of 68 MB for each stream and the allocator
    reuses memory only on its stream. Threads take turns.
    """
    with _alone, torch.cuda.device(device):
        current, was = torch.cuda.current_stream(), _thread.capturing
        key = torch.cuda.current_device(), current.cuda_stream
        stream = _capture_streams.get(key)
        if stream is None:
            stream = _capture_streams[key] = torch.cuda.Stream()
        stream.wait_stream(current)
        _thread.capturing = True
        try:
            # torch.cuda.graph would leave this stream current after a failed capture
            with _turns[stream].lock, torch.cuda.stream(stream):
                _turns[stream].take(device)
                yield
        finally:
            _thread.capturing = was
            current.wait_stream(stream)


def take_workspaces(device: torch.device) -> None:
    """Have cuBLAS allocate its workspaces for both streams now, outside of measurements."""

    def multiply() -> None:
        x = torch.ones(16, 16, device=device, requires_grad=True)
        torch.addmm(x[0], x @ x, x).sum().backward()  # the backward thread has workspaces of its own

    with torch.enable_grad():
        multiply()
        with on_capture_stream(device):
            multiply()


def capture_body(body: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Launch, Any]:
    """Capture `body` on the current stream, or raise its error and leave CUDA usable."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # the warm-up's memory belongs to this stream
    graph, first = torch.cuda.CUDAGraph(), None
    try:
        with collector_off():
            # other threads may allocate meanwhile
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                made = body()
            except BaseException as error:
                first = error  # capture_end raises a less specific one
                raise
            finally:
                graph.capture_end()
    except Exception as error:
        recover(graph, device, pool)
        raise (first or error) from None
    finally:
        first = None  # breaks a reference cycle with this frame, which holds what the body allocated
    return in_turn(graph, device), made


def in_turn(graph: torch.cuda.CUDAGraph, device: torch.device) -> Launch:
    """Replay in turn with other graphs of this capture stream, which share a cuBLAS workspace."""
    turns = _turns[torch.cuda.current_stream(device)]

    def launch() -> None:
        with turns.lock:
            turns.take(device)
            graph.replay()

    return launch


def uncapturable(name: str, why: str) -> ReplearnError:
    return ReplearnError(
        f"{name} can't be captured as a CUDA graph: {why}. A replay launches the same kernels every time, so code "
        "that looks at values, moves tensors between CPU and GPU or waits for the GPU can't be in it. Deploy it "
        "without graph=True (compile=True takes such code), or change that line of its forward."
    )


def recover(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Undo what a failed capture leaves behind, which torch does not.

    The allocator keeps allocating to the graph's pool, so that cached memory can't be released, and the random
    generator stays in capture mode until a capture succeeds.
    """
    _failed.append(graph)
    place = device.index if device.index is not None else torch.cuda.current_device()
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    try:
        if end is not None:
            end(place, pool)
            torch._C._cuda_releasePool(place, pool)  # as a graph does after a successful capture
    except RuntimeError:  # the capture failed after its end, or before its begin
        graph.reset()
    torch.cuda.synchronize(device)
    with collector_off():
        empty, one = torch.cuda.CUDAGraph(), torch.ones(1, device=device)
        empty.capture_begin(capture_error_mode="thread_local")
        one.add_(1)
        empty.capture_end()


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection: freeing a graph during a capture breaks it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def refuse_synchronizing(name: str, body: Callable[[], Any], device: torch.device) -> None:
    """Run the code once and raise if it synchronizes, before a capture fails on it.

    Without torch.compile, which permanently falls back to eager for code that it meets under a dispatch mode.
    """
    # without torch._dynamo nothing is compiled, and loading it takes a second
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with stance, Synchronizing(device) as watching:
        body()
    if watching.found is not None:
        raise uncapturable(name, watching.found)


class Synchronizing(TorchDispatchMode):
    """Stores the first operation that synchronizes with a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self.found is None:
            given = [*tensors_in(args), *tensors_in(kwargs)]
            if any(tensor.device.type == self.device.type for tensor in (*given, *tensors_in(made))):
                self.found = why_it_synchronizes(func, args, kwargs, given, made)
        return made


def why_it_synchronizes(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Tensor], made: Any
) -> str | None:
    packet = func.overloadpacket
    if torch.Tag.data_dependent_output in func.tags:
        return f"its forward reads a value from the GPU ({func}), as an if, .item() or .tolist() does"
    masked = packet is aten.index and any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])
    )
    repeated = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if packet in SIZED_BY_VALUES or masked or repeated:
        return f"the size of a tensor in its forward depends on values ({func})"
    if packet in (aten._to_copy, aten.copy_):
        places = {str(tensor.device) for tensor in (*given, *tensors_in(made))}
        if len({place.split(":")[0] for place in places}) > 1:
            return f"its forward copies a tensor between {' and '.join(sorted(places))} ({func})"
    return None
