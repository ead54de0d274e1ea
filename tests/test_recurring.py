"""A flat graph under autocast on a GPU replays what comes again by itself, and nobody can tell.

Without a GPU a stand-in records what torch's operations read and wrote, and does that again, as a graph does.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import replearn
from replearn import ReplearnError
from replearn.costs.precision import float32_products
from replearn.deployment.exporting import export
from replearn.deployment.quantizing import quantize_dynamic
from replearn.experiments.bench import inference_sides
from replearn.experiments.bench.inference_sides import DEPLOYED, E2E, OPERATORS, Sides, make_sides
from replearn.experiments.bench.inference_sides import DYNAMIC as MOVING
from replearn.fast.graphs import capture as capturing
from replearn.fast.graphs import recurring
from replearn.fast.graphs import replay as replaying
from replearn.fast.graphs.backend_flags import settings
from replearn.fast.graphs.recurring import BEFORE, SEEN, Recurring, replay_for
from replearn.fast.graphs.replay import Recording, Replayed, Weights
from replearn.fast.inference import Autocast
from replearn.fast.verify import tensors_in

THIRD = BEFORE + 1


class Log(TorchDispatchMode):
    """Notes operations with the memory that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        args, kwargs, held = (tree_map(as_it_is, each) for each in (args, kwargs or {}, made))
        self.operations.append((func, args, kwargs, held))
        return made

    def launch(self) -> None:
        for func, args, kwargs, made in self.operations:
            for old, new in zip(tensors_in(made), tensors_in(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def as_it_is(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record on the CPU, and note the names of what was."""
    names: list[str] = []

    def stand_in(name: str, body: Callable[[], Any], device: torch.device, pool: Any) -> Any:
        names.append(name)
        for _ in range(2):
            body()
        with Log() as log:
            output = body()
        return log.launch, output

    monkeypatch.setattr(replaying, "capture", stand_in)
    monkeypatch.setattr(recurring, "replays_on", lambda device: True)
    return names


class Scaled(nn.Module):
    """A layer, and a number that it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        made: Tensor = self.layer(x)
        return made * times


def called(fast: nn.Module, x: Any, count: int = THIRD, **kwargs: Any) -> None:
    for _ in range(count):
        with torch.no_grad():
            fast(x, **kwargs)


def test_what_comes_a_third_time_is_recorded_and_then_replayed(recorded: list[str]) -> None:
    model = Scaled().eval()
    fast = Recurring(model)
    found = []
    for count, batch in enumerate((4, 4, 1, 4, 4, 1, 4, 1)):
        x = torch.randn(batch, 3)
        with torch.no_grad():
            found.append((fast(x), model(x)))
        assert fast.num_graphs == (0 if count < 3 else 1 if count < 7 else 2)
    for one, other in found:  # after all of them: nothing was overwritten
        assert torch.equal(one, other)
    assert recorded == ["Scaled", "Scaled"]
    called(fast, torch.randn(4, 3), times=2.0)  # another kind of call
    assert fast.num_graphs == 3
    called(fast, torch.randn(3, 4).t())  # the layout may be what decides which kernel runs
    assert fast.num_graphs == 4


def test_calls_with_gradients_and_in_train_mode_run_the_model(recorded: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0)).eval()
    fast, x = Recurring(model), torch.randn(4, 3)
    for _ in range(THIRD + 1):
        fast(x).sum().backward()
    assert model[0].weight.grad is not None
    fast.train()
    called(fast, x)
    with torch.no_grad():
        assert not fast(x).any()  # everything is dropped
    assert not recorded
    fast.eval()
    called(fast, x)
    assert fast.num_graphs == 1
    model[1].train()
    with torch.no_grad():
        assert not fast(x).any()
    assert fast.num_graphs == 0


@contextmanager
def everybody_hooked() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


LOOKING_ON: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "a function mode": lambda: torch.device("cpu"),
    "hooks on everything": everybody_hooked,
}


@pytest.mark.parametrize("who", LOOKING_ON)
def test_who_looks_on_sees_the_model(who: str, recorded: list[str]) -> None:
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    with LOOKING_ON[who]():
        called(fast, x, THIRD + 1)
    assert not recorded
    called(fast, x, THIRD + 1)
    assert recorded == ["Linear"]
    with LOOKING_ON[who]() as looking:
        called(fast, x, 1)
    # hooks are noticed while it runs; the others are asked for before
    assert fast.num_graphs == (0 if who == "hooks on everything" else 1)
    if isinstance(looking, FlopCounterMode):
        assert looking.get_total_flops() == 2 * 4 * 3 * 2


def test_a_function_mode_hears_of_every_operation(recorded: list[str]) -> None:
    heard: list[Any] = []

    class Hearing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    called(fast, x, THIRD + 1)
    with Hearing():
        called(fast, x, 1)
    assert nn.functional.linear in heard
    assert recorded == ["Linear"]


def test_in_another_recording_the_model_is_recorded(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    called(fast, x, THIRD + 1)
    monkeypatch.setattr(capturing._here, "recording", True)
    with Log() as log, torch.no_grad():
        fast(x)
    assert any(func is torch.ops.aten.addmm.default for func, *_ in log.operations)
    called(fast, x[:2], THIRD + 1)
    assert recorded == ["Linear"]


def test_threads_take_turns(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = replaying.capture

    def slow(*args: Any) -> Any:
        time.sleep(0.05)  # in which the others come
        return stand_in(*args)

    monkeypatch.setattr(replaying, "capture", slow)
    model = nn.Linear(3, 2).eval()
    fast, wrong = Recurring(model), []

    def work(batch: int) -> None:
        for _ in range(40):
            x = torch.randn(batch, 3)
            with torch.no_grad():
                if not torch.equal(fast(x), model(x)):
                    wrong.append(batch)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in (2, 2, 3, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert recorded == ["Linear", "Linear"]  # once a kind


def test_hooks_hear_of_every_call(recorded: list[str]) -> None:
    model, heard = nn.Sequential(nn.Linear(3, 2)).eval(), []
    fast, x = Recurring(model), torch.randn(4, 3)
    called(fast, x)
    assert fast.num_graphs == 1
    fast.forget()
    called(fast, x, BEFORE)
    handle = model[0].register_forward_hook(lambda *_: heard.append(1))
    called(fast, x, 1)  # which would be recorded
    assert (len(heard), len(recorded)) == (1, 1)
    handle.remove()
    heard.clear()
    called(fast, x)
    handle = model[0].register_forward_hook(lambda *_: heard.append(1))
    called(fast, x, 4)
    assert (len(heard), fast.num_graphs) == (4, 0)
    handle.remove()
    before = model[0].register_forward_pre_hook(lambda *_: heard.append(1))
    called(fast, x, 6)
    assert (len(heard), fast.num_graphs) == (10, 0)
    before.remove()
    forward = model[0].forward

    def other(x: Tensor) -> Any:
        heard.append(1)
        return forward(x)

    model[0].forward = other  # as accelerate does
    called(fast, x, 6)
    assert (len(heard), fast.num_graphs) == (16, 0)
    del model[0].forward
    called(fast, x, 6)
    assert (len(heard), fast.num_graphs) == (16, 1)


def test_traced_compiled_and_transformed_calls_run_the_model(recorded: list[str]) -> None:
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    called(fast, x)
    fast.forget()
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        runs.append(1)
        return graph

    compiled = torch.compile(fast, backend=backend, fullgraph=True)
    for _ in range(THIRD + 1):
        with torch.no_grad():
            assert torch.equal(compiled(x), fast.model(x))
            torch.testing.assert_close(torch.vmap(fast)(x), fast.model(x))
    assert runs == [1]
    with torch.no_grad():
        program = torch.export.export(fast, (x,))
        assert torch.equal(program.module()(x), fast.model(x))
        torch.jit.trace(fast, x)
    assert recorded == ["Linear"]


@contextmanager
def switched(switch: Callable[[Any], Any], other: Any, usual: Any) -> Iterator[None]:
    switch(other)
    try:
        yield
    finally:
        switch(usual)


def reduces(kind: str) -> Callable[[bool], None]:
    return lambda on: setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", on)


ATTENTION = [torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]
ATTENTION += [torch.nn.attention.SDPBackend.CUDNN_ATTENTION]


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "benchmark": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "tf32": lambda: float32_products(tf32=True),
    "order of attention": lambda: torch.nn.attention.sdpa_kernel(
        [torch.nn.attention.SDPBackend.MATH, *ATTENTION], set_priority=True
    ),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "fast path": lambda: switched(torch.backends.mha.set_fastpath_enabled, False, True),
    "accumulation": lambda: switched(torch._C._set_cublas_allow_fp16_accumulation, True, False),
    "reduction in float16": lambda: switched(reduces("fp16"), False, True),
    "reduction in bfloat16": lambda: switched(reduces("bf16"), False, True),
    "attention in half precision": lambda: switched(
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False
    ),
    "deterministic, or a warning": lambda: switched(torch.set_deterministic_debug_mode, "warn", "default"),
    "search": lambda: switched(lambda limit: setattr(torch.backends.cudnn, "benchmark_limit", limit), 3, 10),
    "blas": lambda: switched(torch.backends.cuda.preferred_blas_library, "cublaslt", "cublas"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_of_torch_are_noticed(name: str, recorded: list[str]) -> None:
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    before = settings()
    with SETTINGS[name]():
        assert settings() != before
    assert settings() == before
    called(fast, x, THIRD + 1)
    assert len(recorded) == 1
    with SETTINGS[name]():
        called(fast, x, 1)
        assert fast.num_graphs == 0
        called(fast, x, 2 * THIRD)
        assert len(recorded) == 2
    called(fast, x, 1)
    assert fast.num_graphs == 0


def test_what_changes_all_the_time_is_recorded_ever_more_seldom(recorded: list[str]) -> None:
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    for count in range(400):
        with torch.backends.cudnn.flags(enabled=True, benchmark=bool(count % 2)):
            called(fast, x, 1)
    assert 4 < len(recorded) < 9
    fast.forget()
    called(fast, x)
    assert fast.num_graphs == 1


@pytest.mark.parametrize("change", ["to", "behind its back", "assign", "in place", "turned", "cut"])
def test_other_weights_are_read(change: str, recorded: list[str]) -> None:
    model, x = nn.Linear(3, 3).eval(), torch.randn(4, 3)
    fast = Recurring(model)
    called(fast, x)
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    if change == "to":
        fast.double()
    elif change == "behind its back":
        model.double()
    elif change == "turned":
        model.weight.data = model.weight.data.t()  # the same memory
    elif change == "cut":
        for parameter in model.parameters():
            parameter.data = parameter.data[:2]
    else:
        model.load_state_dict(other, assign=change == "assign")
    x = x.to(model.weight.dtype)
    for _ in range(2 * THIRD + 1):
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert fast.num_graphs == 1
    assert len(recorded) == (1 if change == "in place" else 2)


def test_only_so_many_kinds_are_recorded_and_counted(recorded: list[str]) -> None:
    fast = Recurring(nn.Linear(3, 2).eval(), most=2)
    for batch in (1, 2, 3):
        called(fast, torch.randn(batch, 3), THIRD + 1)
    assert len(recorded) == 2  # the first ones stay: others would drive each other out all the time
    fast = Recurring(nn.Linear(3, 2).eval(), most=1)
    for _ in range(THIRD):
        for batch in (1, 2):  # the second is counted before the first is recorded
            called(fast, torch.randn(batch, 3), 1)
    assert len(recorded) == 3
    fast = Recurring(nn.Linear(3, 2).eval())
    for batch in range(1, SEEN + 10):
        called(fast, torch.randn(batch, 3), 1)
    assert len(fast._seen) < SEEN
    for batch in range(10, SEEN + 1):
        called(fast, torch.randn(batch, 3), 1)
    called(fast, torch.randn(SEEN + 5, 3), 1)  # one that is known makes nobody forget
    assert len(fast._seen) == SEEN


class WritesInto(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + 1


class Counts(nn.Module):
    """Counts its calls, in one of the ways there are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.count: Tensor
        if how == "parameter":
            self.count = nn.Parameter(torch.zeros(()))
        else:
            self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "exchanged":
            self.count = self.count + 1
        else:
            (self.count.data if self.how == "data" else self.count).add_(1)
        return x + self.count


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("how", ["buffer", "parameter", "exchanged", "data"])
def test_what_writes_into_what_it_holds_does_so_once_a_call(how: str) -> None:
    fast, x = Recurring(Counts(how).eval()), torch.zeros(3)
    says = pytest.warns(UserWarning, match="it writes into its buffers, which") if how == "data" else nullcontext()
    with torch.no_grad(), says:
        for count in range(1, 9):
            assert torch.equal(fast(x), torch.full((3,), float(count)))
    assert fast.num_graphs == 0


def test_what_a_failed_recording_wrote_is_undone(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, body: Callable[[], Any], *_: Any) -> Any:
        body()
        raise RuntimeError("no memory")

    monkeypatch.setattr(replaying, "capture", fails)
    fast, x = Recurring(Counts("data").eval()), torch.zeros(3)
    with torch.no_grad(), pytest.warns(UserWarning, match="no memory"):
        assert [float(fast(x)[0]) for _ in range(4)] == [1, 2, 3, 4]


def test_a_call_that_writes_for_once_is_not_counted(recorded: list[str]) -> None:
    fast, x = Recurring(nn.BatchNorm1d(3).eval()), torch.randn(4, 3)
    called(fast.train(), x, 4)  # which writes statistics
    called(fast.eval(), x)
    assert recorded == ["BatchNorm1d"]


RETURNS: dict[str, Callable[[Any, Tensor], Any]] = {
    "its input": lambda model, x: x,
    "a part of it": lambda model, x: x[1:],
    "a tensor twice": lambda model, x: [x + 1] * 2,
    "a tensor and a part of it": lambda model, x: (lambda y: (y, y[1:]))(x + 1),
    "a parameter": lambda model, x: (x + 1, model.weight),
    "a buffer": lambda model, x: (x + 1, model.buffer),
}


class Returns(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.weight = what, nn.Parameter(torch.ones(2))
        self.register_buffer("buffer", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return RETURNS[self.what](self, x)


@pytest.mark.parametrize("what", RETURNS)
def test_outputs_that_share_memory_go_on_doing_so(what: str, recorded: list[str]) -> None:
    fast, x = Recurring(Returns(what).eval()), torch.zeros(3)
    with pytest.warns(UserWarning, match="Returns goes on without .* its outputs share memory with one another"):
        called(fast, x)
    assert (fast.num_graphs, fast._before) == (0, BEFORE)
    with torch.no_grad():
        made = fast(x)
    held = (x, *fast.parameters(), *fast.buffers())
    places = [each.untyped_storage().data_ptr() for each in (*held, *tensors_in(made))]
    assert len(set(places)) < len(places)
    assert recorded == ["Returns"]


class Looks(nn.Module):
    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        return x * x.stride(0)


def test_inputs_with_gaps_are_looked_at_as_they_are(recorded: list[str]) -> None:
    fast = Recurring(Looks().eval())
    for x in (torch.ones(4, 6)[:, :3], torch.ones(1, 3).expand(4, 3)):
        for _ in range(THIRD + 1):
            with torch.no_grad():
                assert torch.equal(fast(x), x * x.stride(0))
    x = torch.ones(4, 3)
    for other in (nn.Parameter(x), torch.zeros(0), torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)):
        called(fast, x, THIRD + 1, other=other)  # one of them is enough
    assert not recorded
    called(fast, x, THIRD + 1, other=x + 1)
    assert recorded == ["Looks"]


def test_what_cannot_be_looked_at_runs(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no storage")

    monkeypatch.setattr(recurring, "place_of", fails)  # as for weights of some subclasses
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    with pytest.warns(UserWarning, match="of this kind: no storage"):
        called(fast, x)
    called(fast, x, THIRD + 1)
    assert (fast.num_graphs, recorded) == (0, ["Linear"])


def test_a_tensor_elsewhere_is_told(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def record(model: nn.Module, *_: Any) -> Recording:
        return Recording(torch.device("meta"), [], None, lambda: None, Weights(model), [])

    monkeypatch.setattr(replaying, "record", record)
    with pytest.warns(UserWarning, match="a tensor of its own is not on meta"):
        called(Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3))


def test_changes_after_many_replays_cost_no_more(recorded: list[str]) -> None:
    model, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast = Recurring(model)
    for count in range(1, 4):
        called(fast, x, 100)
        assert len(recorded) == count
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def test_a_call_that_fails_is_no_call(recorded: list[str]) -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 6) + 1

    fast, x = Recurring(Views().eval()), torch.randn(1, 3).expand(4, 3)
    for _ in range(THIRD + 1):
        with torch.no_grad(), pytest.raises(RuntimeError, match="view"):
            fast(x)
    called(fast, torch.zeros(0, 6), THIRD + 1)  # and one of nothing is not worth it
    assert not recorded


def test_what_writes_into_its_inputs_goes_on_doing_so(recorded: list[str]) -> None:
    fast, x = Recurring(WritesInto().eval()), torch.ones(3)
    called(fast, x, 4)
    assert torch.equal(x, torch.full((3,), 16.0))
    assert not recorded
    fast = Recurring(WritesInto().eval())
    with torch.inference_mode():
        x = torch.ones(3)  # which keeps no count of who writes into it
        with pytest.warns(UserWarning, match="WritesInto goes on without .* it writes into its inputs, and a"):
            called(fast, x)
        assert torch.equal(x, torch.full((3,), 8.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            called(fast, x)  # nobody tries again, or says it again
    assert torch.equal(x, torch.full((3,), 64.0))
    assert (fast.num_graphs, len(recorded)) == (0, 1)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ReplearnError("Linear can't: no."), "Linear can't: no"),
        (torch.OutOfMemoryError("full.\nof it"), "full"),
        (torch.OutOfMemoryError(""), "OutOfMemoryError"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "CUBLAS_STATUS_ALLOC_FAILED"),
        (capturing.unrecordable("Linear", "it waits"), "Linear can't be recorded: it waits"),
    ],
)
def test_what_cannot_be_recorded_runs_and_a_warning_says_why(
    error: Exception, said: str, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        recorded.append("tried")
        raise error

    monkeypatch.setattr(replaying, "capture", fails)
    model, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fast = Recurring(model)
    called(fast, x, BEFORE)
    with torch.no_grad(), pytest.warns(UserWarning, match=rf"of this kind: {said}\. With graph=False") as told:
        fast(x)
    assert [each.filename for each in told] == [__file__]
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert recorded == ["tried"]
    model.double()
    fast._drop()  # as after a change that was noticed
    called(fast, x.double())
    called(fast, x.double())
    assert recorded == ["tried", "tried"]  # another kind, once
    model.float()
    called(fast, x, 2 * THIRD)
    assert len(recorded) == 2
    fast.forget()
    with pytest.warns(UserWarning, match="of this kind"):
        called(fast, x)
    assert len(recorded) == 3
    monkeypatch.setattr(fast, "_refused", set(range(SEEN)))
    fast._refuse("another")
    assert fast._refused == {"another"}


def test_calls_that_cannot_be_told_apart_run_the_model(recorded: list[str]) -> None:
    class Takes(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[0] + 1 if isinstance(x, tuple) and len(x) == 3 else x

    fast = Recurring(Takes().eval())
    for given in (object(), torch.eye(3).to_sparse(), 3, nn.Parameter(torch.ones(1)), (torch.ones(1), object())):
        for _ in range(THIRD + 1):
            with torch.no_grad():
                assert fast(given) is given
    assert not recorded
    called(fast, (torch.ones(2), [torch.ones(3)], 4))
    assert fast.num_graphs == 1


@pytest.mark.parametrize("how", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_count_for_themselves(how: Callable[[Any], Any], recorded: list[str]) -> None:
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    called(fast, x)
    other = how(fast)
    assert (other.num_graphs, fast.num_graphs) == (0, 1)
    assert not other._seen
    assert other._lock is not fast._lock
    called(other, x)
    with torch.no_grad():
        assert torch.equal(other(x), fast(x))
    assert len(recorded) == 2
    replica = fast._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica.model, calls = fast.model, []
    replica._run = lambda *_: calls.append("a replay")
    called(replica, x, THIRD + 1)
    assert not calls
    assert (fast.num_graphs, len(recorded)) == (1, 2)


def test_inference_mode_and_autocast_are_the_callers(recorded: list[str]) -> None:
    fast, x = Recurring(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    for _ in range(THIRD + 1):
        with torch.inference_mode():
            assert fast(x).is_inference()
        with torch.no_grad():
            assert not fast(x).is_inference()
    assert len(recorded) == 1
    try:
        torch.set_autocast_enabled("cuda", True)
        called(fast, x)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert len(recorded) == 2


@pytest.mark.parametrize(
    ("graph", "options", "expected"),
    [
        (None, {}, Recurring),
        (None, {"flatten": False}, None),  # whose code may do anything
        (None, {"dtype": None}, None),  # a plain model, to store and to export
        (None, {"compile": True}, None),
        (False, {}, None),
        (True, {}, Replayed),
        (True, {"flatten": False, "dtype": None}, Replayed),
    ],
)
def test_which_models_replay_by_themselves(
    graph: bool | None, options: dict[str, Any], expected: type | None, recorded: list[str]
) -> None:
    how: dict[str, Any] = {"flatten": True, "dtype": torch.float16, "compile": False} | options
    assert replay_for(nn.Linear(3, 2), graph, **how) is expected


@pytest.mark.usefixtures("recorded")
def test_deploy_and_streamline_give_them(tmp_path: Any) -> None:
    model, images = tiny.replaced(tiny.resnet()).eval(), torch.randn(2, 3, 32, 32)
    options: dict[str, Any] = {"flatten": True, "dtype": torch.bfloat16}
    fast = replearn.deploy(model, images, **options)
    base = replearn.fast.streamline(tiny.resnet().eval(), images, **options)
    plain = replearn.deploy(model, images, graph=False, **options)
    assert type(fast) is type(base) is Recurring
    assert type(plain) is type(fast.model) is Autocast
    for _ in range(THIRD + 1):
        with torch.inference_mode():
            assert torch.equal(fast(images), plain(images))
    assert fast.num_graphs == 1
    assert not isinstance(replearn.deploy(model, images, flatten=True), Replayed)
    with pytest.raises(ReplearnError, match="deployed with dtype= runs under autocast"):
        export(fast, tmp_path / "x.onnx", images)
    with pytest.raises(ReplearnError, match="deployed with dtype= can't be quantized"):
        quantize_dynamic(fast)


def test_on_a_cpu_nothing_is_replayed() -> None:
    model, images = tiny.replaced(tiny.resnet()).eval(), torch.randn(2, 3, 32, 32)
    assert type(replearn.deploy(model, images, flatten=True, dtype=torch.bfloat16)) is Autocast
    fast = Recurring(nn.Linear(3, 2).eval())
    called(fast, torch.randn(4, 3), THIRD + 1)
    assert fast.num_graphs == 0


def test_all_sides_of_a_comparison_are_replayed_or_none(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_sides, "replays_on", lambda device: True)
    sides: Sides = make_sides("cifar_resnet:20:4", 8, torch.device("cpu"), 2)
    kinds, images = (E2E, MOVING, OPERATORS, DEPLOYED), torch.randn(2, 3, 8, 8)
    for backend, kind in (("amp", Recurring), ("amp+eager", Autocast)):
        for side in sides.built(backend, kinds, images).values():
            assert type(side) is kind
            called(side, images, THIRD + 1)
            assert not isinstance(side, Recurring) or side.num_graphs == 1
    assert all(type(side) is Autocast for side in sides.built("amp", kinds, images, flatten=False).values())
    assert not any(isinstance(side, Replayed) for side in sides.built("fp32", kinds, images).values())


# ---- on a GPU ------------------------------------------------------------------------------------


cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MODELS = ["cifar_resnet:20:16", "vit:64:4:2:4"]


def forms(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """What deploy gives by itself, and without graphs."""
    sides = make_sides(name, 32, torch.device("cuda"), 2)
    x = torch.randn(4, 3, 32, 32, device="cuda")
    how: dict[str, Any] = {"flatten": True, "merge": True, "dtype": torch.float16} | options
    plain, fast = (replearn.deploy(sides.replaced, x, graph=graph, **how) for graph in (False, None))
    return fast, plain


class TestOnAGPU:
    pytestmark = cuda

    @pytest.mark.parametrize("fuse", [False, True])
    @pytest.mark.parametrize("name", MODELS)
    def test_replays_give_what_the_model_does(self, name: str, fuse: bool) -> None:
        fast, plain = forms(name, fuse=fuse)
        made = []
        for batch in (4, 4, 1, 4, 4, 1, 1, 1, 7):
            x = torch.randn(batch, 3, 32, 32, device="cuda")
            with torch.inference_mode():
                made.append((fast(x), plain(x)))
        assert fast.num_graphs == 2
        for one, other in made:
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))

    def test_gradients_other_weights_and_devices(self) -> None:
        fast, plain = forms(MODELS[0])
        x = torch.randn(4, 3, 32, 32, device="cuda")
        called(fast, x, THIRD + 1)
        assert fast.num_graphs == 1
        given = x.clone().requires_grad_()
        fast(given).float().sum().backward()
        assert given.grad is not None
        with torch.no_grad():
            for form in (fast, plain):
                for parameter in form.parameters():
                    parameter.data = parameter.data * 1.1
            filling = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(8)]
            torch.testing.assert_close(fast(x), plain(x), rtol=2e-2, atol=2e-2)
            assert fast.num_graphs == 0
            called(fast, x, 2 * THIRD)
            assert len(filling) == 8
            assert fast.num_graphs == 1
            torch.testing.assert_close(fast(x), plain(x), rtol=2e-2, atol=2e-2)
            fast.cpu()
            plain.cpu()
            called(fast, x.cpu(), THIRD + 1)
            assert fast.num_graphs == 0
            torch.testing.assert_close(fast(x.cpu()), plain(x.cpu()), rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("name", MODELS)
    def test_python_launches_one_graph_instead_of_kernels(self, name: str) -> None:
        fast, plain = forms(name)
        x = torch.randn(4, 3, 32, 32, device="cuda")
        called(fast, x, THIRD + 1)
        called(plain, x, THIRD + 1)
        counts = []
        for form in (fast, plain):
            with torch.no_grad(), torch.profiler.profile() as profiled:
                form(x)
                torch.cuda.synchronize()
            names = [event.key for event in profiled.key_averages()]
            counts.append(any("GraphLaunch" in key for key in names))
        assert counts == [True, False]

    def test_other_threads_may_allocate_while_it_is_recorded(self) -> None:
        fast, plain = forms(MODELS[0])
        stop, errors = threading.Event(), []

        def busy() -> None:
            try:
                while not stop.is_set():
                    torch.empty(1 << 20, device="cuda").fill_(1)
                    torch.ones(1 << 10).pin_memory()
            except Exception as error:  # told below
                errors.append(error)

        other = threading.Thread(target=busy)
        other.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for batch in range(1, 6):
                    called(fast, torch.randn(batch, 3, 32, 32, device="cuda"), THIRD + 1)
        finally:
            stop.set()
            other.join()
        assert not errors
        assert fast.num_graphs == 5
        x = torch.randn(3, 3, 32, 32, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(fast(x), plain(x), rtol=2e-2, atol=2e-2)
