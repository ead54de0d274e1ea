"""`graph=True` on a GPU: replays equal the model, outputs stay, and a recording that fails breaks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import replearn
from replearn import ReplearnError
from replearn.experiments.training.architectures import architecture
from replearn.fast.graphs import replay as replaying
from replearn.fast.graphs.replay import Replayed

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def vit() -> nn.Module:
    return architecture("vit:16:4:2:4", num_classes=10, size=32)


@pytest.fixture
def exact() -> Any:
    """float32 in full, so that differences are not those of other kernels."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [tiny.resnet, vit])
def test_a_replay_gives_the_outputs_of_the_model(
    make: Callable[[], nn.Module], dtype: torch.dtype | None, channels_last: bool, merge: bool
) -> None:
    model = tiny.replaced(make()).eval().cuda()
    options: dict[str, Any] = {"dtype": dtype, "channels_last": channels_last, "merge": merge}
    plain, fast = (replearn.deploy(model, graph=graph, **options) for graph in (False, True))
    made = []
    for batch in (1, 4, 2, 4, 1):
        x = torch.randn(batch, 3, 32, 32, device="cuda")
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        with torch.inference_mode():
            made.append((fast(x), plain(x)))
    for one, other in made:  # after all of them: nothing was overwritten
        assert one.dtype is other.dtype
        few = 1e-5 if dtype is None else 2e-2
        torch.testing.assert_close(one, other, rtol=few, atol=few * float(other.abs().max()))
    assert fast.num_graphs == 3


@pytest.mark.usefixtures("exact")
def test_compiled_code_is_replayed() -> None:
    model = tiny.replaced(tiny.resnet()).eval().cuda()
    plain = replearn.deploy(model)
    fast = replearn.deploy(model, compile=True, graph=True)
    for _ in range(3):
        x = torch.randn(4, 3, 32, 32, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)
    assert fast.num_graphs == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        fast(x)
        torch.cuda.synchronize()
    assert any(event.name.startswith("triton_") for event in profiled.events())  # the compiler's, not torch's


@pytest.mark.usefixtures("exact")
def test_weights_on_a_gpu_may_change_in_place_and_move() -> None:
    model = replearn.fast.streamline(tiny.resnet().eval().cuda())
    fast, x = Replayed(model), torch.randn(2, 3, 32, 32, device="cuda")
    with torch.no_grad():
        fast(x)
        (first,) = fast._graphs.values()
        for parameter in model.parameters():
            parameter.mul_(1.1)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        assert next(iter(fast._graphs.values())) is first  # the same graph reads the new values
        fast.to(torch.float16)
        half = fast(x.half())
        assert half.dtype is torch.float16
        torch.testing.assert_close(half, model(x.half()), rtol=2e-2, atol=2e-2)
        model.float()  # behind its back, and the old memory is filled by others
        filling = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        assert len(filling) == 8
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1  # the same kind of input, and a graph that reads the old memory
        filling += [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(8)]
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        assert fast.num_graphs == 1
        with pytest.raises(ReplearnError, match="is on cpu, and only what runs on a CUDA GPU"):
            fast.cpu()(x.cpu())
        torch.testing.assert_close(fast.cuda()(x), model(x), rtol=1e-5, atol=1e-5)


class Breaking(nn.Module):
    """Breaks a recording in a way that nothing foresees."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        if self.how == "sync":
            torch.cuda.synchronize()
        elif self.how == "item" and float(made.sum()) > 1e9:
            return -made
        elif self.how == "raise" and torch.cuda.is_current_stream_capturing():
            raise KeyError("only while recording")
        return made


@pytest.mark.parametrize("how", ["item", "sync", "raise"])
def test_a_recording_that_fails_leaves_the_gpu_usable(how: str) -> None:
    good, x = Replayed(nn.Linear(3, 3).eval().cuda()), torch.randn(4, 3, device="cuda")
    expected = good(x)
    stream = torch.cuda.current_stream()
    bad = Replayed(Breaking(how).eval().cuda())
    for _ in range(2):
        with pytest.raises(
            ReplearnError, match=r"Breaking can't be captured as a CUDA graph: .*without graph=True"
        ):
            bad(x)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert bad.model(x).isfinite().all()  # and runs as it is
    assert torch.randn(1000, device="cuda").std() > 0  # the generator is not in a recording any more
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert torch.equal(good(x), expected)
    other = torch.randn(8, 3, device="cuda")
    torch.testing.assert_close(good(other), good.model(other))
    bad.model.how = "nothing"
    torch.testing.assert_close(bad(x), bad.model(x))


def test_graphs_share_their_memory_and_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "MAX_GRAPHS", 3)
    model = nn.Sequential(nn.Linear(256, 8192), nn.GELU(), nn.Linear(8192, 256)).eval().cuda()
    fast = Replayed(model)
    expected = {}
    reserved = []
    for rows in (8192, 8191, 8190, 8189, 8188, 8187):
        x = torch.randn(rows, 256, device="cuda")
        with torch.no_grad():
            expected[rows] = x, model(x), fast(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    each = 8192 * 256 * 4
    # a graph has two wide tensors, of 32 each; the first graph's output lies where one of them was, so the second
    # takes one more, and nobody after it does
    assert reserved[1] - reserved[0] <= 34 * each
    assert reserved[-1] - reserved[1] <= 8 * each
    assert fast.num_graphs == 3
    for x, plain, replayed in expected.values():
        torch.testing.assert_close(replayed, plain, rtol=1e-4, atol=1e-4)  # from before, and not overwritten
        torch.testing.assert_close(fast(x), plain, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(replaying, "MAX_GRAPHS", 1)
    one = Replayed(model)  # whose pool loses its last graph every time
    for x, plain, _ in (*expected.values(), *expected.values()):
        torch.testing.assert_close(one(x), plain, rtol=1e-4, atol=1e-4)
    held = torch.cuda.memory_allocated()
    one.forget()
    fast.forget()
    assert torch.cuda.memory_allocated() < held


def test_calls_on_several_streams_and_in_another_recording() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).eval().cuda()
    fast = Replayed(model)
    inputs = [torch.randn(256, 512, device="cuda") for _ in range(12)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    fast(inputs[0])
    torch.cuda.synchronize()
    streams, made = [torch.cuda.Stream() for _ in range(3)], []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            made.append(fast(x))
    torch.cuda.synchronize()
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        inside = fast(inputs[1])
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(inside, expected[1], rtol=1e-4, atol=1e-4)


class Long(nn.Module):
    """Products whose sums are so long that cuBLAS cuts them, and keeps the parts in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1 << 16, 64) / 256)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ self.weight * scale for scale in range(1, 9)])


def test_models_on_streams_of_their_own_do_not_work_in_the_same_memory() -> None:
    models = [Replayed(Long().cuda()) for _ in range(2)]
    inputs = [torch.randn(64, 1 << 16, device="cuda") for _ in models]
    expected = [fast(x) for fast, x in zip(models, inputs, strict=True)]  # both recorded on this stream
    torch.cuda.synchronize()
    streams, made = [torch.cuda.Stream() for _ in models], []
    for _ in range(50):
        for fast, x, stream in zip(models, inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(fast(x))
    torch.cuda.synchronize()
    for number, one in enumerate(made):
        torch.testing.assert_close(one, expected[number % 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["sync", "raise"])
def test_recordings_that_fail_give_their_memory_back(how: str) -> None:
    bad = Replayed(nn.Sequential(nn.Linear(3, 4096), nn.Linear(4096, 3), Breaking(how)).eval().cuda())
    x, reserved = torch.randn(4096, 3, device="cuda"), []  # 64 MiB between the layers
    with torch.no_grad():
        bad.model[:2](x)
    for _ in range(4):
        with pytest.raises(ReplearnError):
            bad(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[0] < 2**25
