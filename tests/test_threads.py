"""Several threads at once: deploying, running what is replaced, and running what is not."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replearn
from replearn import ReplearnError
from replearn.blocks.tracing import trace


def errors_of(*jobs: Callable[[], Any]) -> list[Exception]:
    """What the jobs raise when each runs in a thread of its own."""
    raised: list[Exception] = []

    def guarded(job: Callable[[], Any]) -> None:
        try:
            job()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_four_threads_deploy_while_others_call_modules() -> None:
    known = nn.Module.__call__, nn.Module.__getattr__, torch.arange, torch.full
    left = [4]

    def deploy() -> None:
        try:
            model = replearn.models.CifarResNet(20, width=4)
            replearn.replace_(model, replearn.plan(model, interval=2, first=2)).eval()
            replearn.deploy(model, torch.randn(2, 3, 16, 16), flatten=True)
        finally:
            left[0] -= 1

    def work() -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        while left[0] > 0:
            assert net(torch.arange(6.0).view(2, 3)).shape == (2, 2)

    assert errors_of(*[deploy] * 4, *[work] * 2) == []
    assert known == (nn.Module.__call__, nn.Module.__getattr__, torch.arange, torch.full)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.layers(x)
        return made


def test_threads_share_a_whole_block() -> None:
    model = nn.Sequential(*(Block() for _ in range(5))).eval()
    replearn.replace_(model, replearn.plan(model)).eval()
    x = torch.randn(3, 8)
    expected = model(x)
    switching = sys.getswitchinterval()

    def run() -> None:
        for _ in range(30):
            with torch.no_grad():
                assert torch.equal(model(x), expected)

    sys.setswitchinterval(1e-6)
    try:
        assert errors_of(*[run] * 4) == []
    finally:
        sys.setswitchinterval(switching)


def test_tracing_leaves_a_module_and_its_callers_alone() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.notes = nn.Linear(4, 4), {"calls": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.notes["calls"] += 1
            self.calls = self.notes["calls"]
            made: Tensor = self.layer(x)
            return made + torch.arange(x.shape[-1]) + torch.pow(x, 2.0)

    module = Remembers()
    before = {name: id(value) for name, value in vars(module).items()}
    graph = trace(module)
    assert not isinstance(graph, str), graph
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["layer"]
    assert {name: id(value) for name, value in vars(module).items()} == before
    assert module.notes == {"calls": 0}


@pytest.mark.parametrize(
    "asks",
    [lambda x: float(x), lambda x: x.__setitem__(0, 1), lambda x: [*x], lambda x: x if x.sum() > 0 else -x],
    ids=["number", "assignment", "iteration", "branch"],
)
def test_code_that_asks_a_traced_tensor_for_values_is_not_traced(asks: Callable[[Tensor], Any]) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return asks(x)

    assert "Error" in str(trace(Asks()))


def test_fnet_whose_trace_ended_the_process_is_flattened() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50}
    model = transformers.FNetModel(transformers.FNetConfig(**sizes, max_position_embeddings=16)).eval()
    ids = torch.randint(0, 50, (2, 8))
    flat = replearn.fast.streamline(model, ids, flatten=True)
    torch.testing.assert_close(flat(ids)["last_hidden_state"], model(ids).last_hidden_state)


def test_a_forward_that_is_no_function_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model.forward = functools.partial(nn.Sequential.forward, model)
    with pytest.raises(ReplearnError, match="its forward is a partial"):
        replearn.fast.streamline(model, torch.randn(2, 4), flatten=True)


class Draws(nn.Module):
    """Draws random numbers where it is traced, and where it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3), torch.randint(2, 9, (3,)), torch.empty(3).normal_(), torch.randperm(4)
        made: Tensor = x + self.layer(x)
        return made


def test_another_thread_draws_the_same_numbers_while_one_deploys() -> None:
    """Neither tracing nor comparing sets the process's random numbers back, so none is drawn twice."""
    model = nn.Sequential(*(Draws() for _ in range(5)))
    replearn.replace_(model, replearn.plan(model)).eval()
    x, drawn, done = torch.randn(3, 8), list[Tensor](), [False]

    def draw() -> None:
        while not done[0]:
            drawn.append(torch.rand(4))

    def deploy() -> None:
        try:
            for _ in range(4):
                replearn.deploy(model, x, flatten=True)
        finally:
            done[0] = True

    assert errors_of(draw, deploy) == []
    assert len(drawn) > 100
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn)


def test_tracing_and_comparing_draw_nothing_from_the_process() -> None:
    model = nn.Sequential(*(Draws() for _ in range(5)))
    replearn.replace_(model, replearn.plan(model)).eval()
    x, before = torch.randn(3, 8), torch.get_rng_state()
    replearn.deploy(model, x, flatten=True)
    assert torch.equal(torch.get_rng_state(), before)
