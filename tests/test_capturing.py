"""A recording and its launches, with CUDA's doors played by stand-ins: what runs on which stream, after what."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replearn import ReplearnError
from replearn.experiments.training.step import CapturedStep
from replearn.fast.graphs import capture as capturing
from replearn.fast.graphs import replay as replaying
from replearn.fast.graphs.capture import capture, collector_off, on_capture_stream, take_workspaces
from replearn.fast.graphs.replay import CapturedGraph, Replayed, Weights

GPU = torch.device("cuda", 1)


class Graph:
    """Notes what is asked of it; ending fails where the recording was broken."""

    broken = False
    log: list[str]

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        Graph.log.append(f"begin {pool} {capture_error_mode} collector {gc.isenabled()}")

    def capture_end(self) -> None:
        Graph.log.append("end")
        if Graph.broken:
            Graph.broken = False
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        Graph.log.append("replay")

    def reset(self) -> None:
        Graph.log.append("reset")


class Stream:
    """Known by a number; 0 is the one that all begin on, and those made here are counted from 100."""

    current: Stream
    made = 100

    def __init__(self, number: int | None = None) -> None:
        if number is None:
            number, Stream.made = Stream.made, Stream.made + 1
        self.cuda_stream = number

    def wait_stream(self, other: Stream) -> None:
        Graph.log.append(f"{self.cuda_stream} waits for {other.cuda_stream}")


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Graph.log, Graph.broken, Stream.current, Stream.made = [], False, Stream(0), 100

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: place.index)
        yield

    def give_up(index: int, pool: str) -> None:
        if pool == "ended":
            raise RuntimeError("not currently recording to mempool_id")
        Graph.log.append(f"give up {pool} on {index}")

    def release(index: int, pool: str) -> None:
        Graph.log.append(f"release {pool} on {index}")

    monkeypatch.setattr(capturing, "_capture_streams", {})
    monkeypatch.setattr(capturing, "_failed", [])
    monkeypatch.setattr(capturing, "_turns", defaultdict(capturing.Turns))
    stand_ins: dict[str, Any] = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": on,
        "device": device,
        "current_stream": lambda device=None: Stream.current,
        "graph_pool_handle": lambda: "new",
        "max_memory_allocated": lambda device: 10_000,
        **dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda device=None: None),
        **dict.fromkeys(("get_rng_state", "set_rng_state"), lambda *given: None),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None, **options: ones(*size, **options))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", give_up, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    return Graph.log


def a_graph() -> Callable[[], None]:
    return capture("Net", lambda: torch.zeros(2), GPU, "pool")[0]


def failing(cuda: list[str], error: BaseException, broken: bool = True) -> Callable[[], Tensor]:
    """Code that runs in the warm-up, and fails once the recording has begun."""

    def body() -> Tensor:
        if len(cuda) > 1:
            Graph.broken = broken
            raise error
        return torch.zeros(2)

    return body


def test_a_recording_is_warmed_up_and_ordered(cuda: list[str]) -> None:
    runs: list[int] = []
    launch, made = capture("Net", lambda: runs.append(len(cuda)) or torch.zeros(2), GPU, "pool")
    launch()
    assert torch.equal(made, torch.zeros(2))
    assert runs == [1, 1, 1, 2]  # three before it begins, and one in it
    begin = "begin pool thread_local collector False"
    assert cuda == ["100 waits for 0", begin, "end", *["0 waits for 100"] * 2, "replay"]
    assert gc.isenabled()


def test_all_recordings_from_a_stream_are_made_on_one(cuda: list[str]) -> None:
    used = []
    for number in (0, 0, 7, 0, 7):
        with on(Stream(number)):
            capture("Net", lambda: used.append(Stream.current.cuda_stream) or torch.zeros(2), GPU, "pool")
    # cuBLAS keeps memory for every stream that it works on, and what may run at once must not work in the same
    assert used == [*[100] * 8, *[101] * 4, *[100] * 4, *[101] * 4]
    with on_capture_stream(torch.device("cuda", 0)):
        assert Stream.current.cuda_stream == 102


def test_graphs_that_work_in_the_same_memory_are_launched_in_turn(cuda: list[str]) -> None:
    first, second = a_graph(), a_graph()
    one, two = Stream(7), Stream(8)
    with on(two):
        other = a_graph()
    for stream, launch in ((one, first), (two, other)):
        with on(stream):
            launch()  # after their graphs
    cuda.clear()
    for stream, launch in ((one, first), (one, second), (two, other), (two, first), (one, second)):
        with on(stream):
            launch()
    assert cuda == [*["replay"] * 3, "8 waits for 7", "replay", "7 waits for 8", "replay"]
    a_graph()  # its warm-up works in that memory too
    assert "100 waits for 7" in cuda


def test_nobody_launches_a_graph_while_another_warms_up_in_its_memory(cuda: list[str]) -> None:
    launch = a_graph()
    cuda.clear()
    with on_capture_stream(GPU):
        other = threading.Thread(target=launch)
        other.start()
        other.join(timeout=0.1)
        assert "replay" not in cuda
    other.join()
    assert cuda[-1] == "replay"


def test_the_code_is_blamed_and_not_the_recording_that_it_broke(cuda: list[str]) -> None:
    told = "operation not permitted when stream is capturing"
    with pytest.raises(ReplearnError) as caught:
        capture("Net", failing(cuda, RuntimeError(f"{told}\nmore")), GPU, "pool")
    assert f"Net can't be captured as a CUDA graph: RuntimeError: {told}. A" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert cuda[2:5] == ["end", "give up pool on 1", "release pool on 1"]
    assert cuda[5:] == ["begin None thread_local collector False", "end", "0 waits for 100"]  # one that ends well
    assert [type(graph) for graph in capturing._failed] == [Graph]  # never freed
    assert gc.isenabled()


def test_a_recording_that_ended_before_its_error_gives_its_memory_back(cuda: list[str]) -> None:
    with pytest.raises(ReplearnError, match="KeyError: 'only while recording'"):
        capture("Net", failing(cuda, KeyError("only while recording"), broken=False), GPU, "ended")
    assert cuda[2:4] == ["end", "reset"]


def test_a_recording_that_fails_holds_nothing_of_what_it_made(cuda: list[str]) -> None:
    held: list[weakref.ref[nn.Module]] = []

    def body() -> Tensor:
        made = nn.Identity()
        held.append(weakref.ref(made))
        if len(cuda) > 1:
            Graph.broken = True
            raise RuntimeError("out of memory, say")
        return torch.zeros(2)

    with collector_off():  # memory must not wait for it
        with suppress(ReplearnError):
            capture("Net", body, GPU, "pool")
        assert len(held) == 4
        assert not any(made() for made in held)


def test_other_errors_come_through(cuda: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        capture("Net", lambda: 1 // 0, GPU, "pool")
    assert cuda == ["100 waits for 0", "0 waits for 100"]  # what it began may still be at work
    for error in (torch.OutOfMemoryError("out of memory"), KeyboardInterrupt()):
        cuda.clear()
        with pytest.raises(type(error)):
            capture("Net", failing(cuda, error), GPU, "pool")
        assert "release pool on 1" in cuda


def test_cublas_takes_its_memory_for_both_streams(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    backward = Tensor.backward

    def note(tensor: Any) -> None:
        found.append((Stream.current.cuda_stream, [node.name() for node, _ in tensor.grad_fn.next_functions]))
        backward(tensor)

    monkeypatch.setattr(Tensor, "backward", note)
    with torch.no_grad():
        take_workspaces(GPU)
    assert found == [(0, ["AddmmBackward0"]), (100, ["AddmmBackward0"])]  # a backward pass has a thread of its own


# ---- a replayed model ----------------------------------------------------------------------------


def test_a_replayed_model_in_another_one_is_recorded_with_it_and_nobody_waits_for_ever(cuda: list[str]) -> None:
    model, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    inner, made = Replayed(model), []

    def record() -> None:
        with on_capture_stream(GPU), torch.no_grad():
            made.append(inner(x))

    with inner._lock:  # as a call has it that waits to record
        other = threading.Thread(target=record)
        other.start()
        other.join(timeout=10)
        assert not other.is_alive()
    assert torch.equal(made[0], model(x))
    assert inner.num_graphs == 0


def test_a_call_on_another_stream_waits_for_the_last(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def record(model: nn.Module, *_: Any) -> CapturedGraph:
        return CapturedGraph(GPU, [torch.zeros(4, 3)], None, lambda: cuda.append("replay"), Weights(model), [])

    monkeypatch.setattr(replaying, "device_of", lambda *_: GPU)
    monkeypatch.setattr(replaying, "capture_forward", record)
    fast, x = Replayed(nn.Linear(3, 2)), torch.randn(4, 3)
    one, two = Stream(7), Stream(8)
    for stream in (one, two, two, one):
        with on(stream):
            fast(x)
    assert cuda == ["replay", "8 waits for 7", "replay", "replay", "7 waits for 8", "replay"]


def test_memory_of_failed_recordings_is_not_used_again(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[int] = []

    def record(model: nn.Module, args: Any, kwargs: Any, device: torch.device, pool: int) -> CapturedGraph:
        pools.append(pool)
        if args[0].shape[0] > 4:
            raise ReplearnError("too many")
        return CapturedGraph(GPU, [args[0].clone()], None, lambda: None, Weights(model), [])

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: len(pools))
    monkeypatch.setattr(replaying, "device_of", lambda *_: GPU)
    monkeypatch.setattr(replaying, "capture_forward", record)
    fast = Replayed(nn.Linear(3, 2))
    for batch in (1, 2, 5, 3):
        with suppress(ReplearnError):
            fast(torch.randn(batch, 3))
    fast.forget()
    fast(torch.randn(1, 3))
    assert pools == [0, 0, 0, 3, 4]


# ---- a training step -----------------------------------------------------------------------------


class Trained:
    """A model in training, whose step fails when it is told to."""

    def __init__(self, fails_at: int = 0) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sums, self.runs, self.fails_at = torch.zeros(1), 0, fails_at

    def body(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 3)).square().sum().backward()
        self.sums += 1
        self.optimizer.step()
        self.runs += 1
        if self.runs == self.fails_at:
            raise RuntimeError("out of memory, say")

    def captured(self) -> CapturedStep:
        return CapturedStep(self.body, self.model, self.optimizer, [self.sums])

    def values(self) -> list[Tensor]:
        held = [*self.model.state_dict().values(), self.sums, torch.get_rng_state()]
        return [tensor.clone() for tensor in held]


@pytest.mark.parametrize("fails_at", [0, 2, 4])  # not at all, in the warm-up, in the recording
def test_a_step_that_is_recorded_or_not_leaves_everything_as_it_was(fails_at: int, cuda: list[str]) -> None:
    trained = Trained(fails_at)
    before = trained.values()
    if fails_at:
        with pytest.raises(RuntimeError, match="out of memory, say"):
            trained.captured()
    else:
        step = trained.captured()
        step()
        assert cuda[-1] == "replay"
        assert step.peak_memory == 10_000 - sum(t.nbytes for t in before[:-1])
    for one, other in zip(trained.values(), before, strict=True):
        assert torch.equal(one, other)
    for state in trained.optimizer.state.values():
        assert not state["momentum_buffer"].any()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_draws_the_random_numbers_of_a_plain_one() -> None:
    trained = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 4)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(16, 8, device="cuda")

        def body(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
            optimizer.step()

        torch.manual_seed(1)  # as a run does before every step, and the first of them is recorded
        step: Any = CapturedStep(body, model, optimizer, []) if captured else body
        step()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_after_cublas_took_its_memory_training_takes_no_more_of_it() -> None:
    device = torch.device("cuda")
    weight = torch.randn(64, 64, device=device, requires_grad=True)
    take_workspaces(device)
    for around in (nullcontext, lambda: on_capture_stream(device)):
        before = torch.cuda.memory_allocated()
        with around():
            (weight @ weight).sum().backward()
        weight.grad = None
        assert torch.cuda.memory_allocated() - before < 2**20  # 32 MiB for each thread and stream on an H200
