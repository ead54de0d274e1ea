"""Several threads at once: deploying, running what is replaced, and running what is not."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replearn
from replearn import ReplearnError
from replearn.blocks.global_settings import plain_encoder_layers
from replearn.blocks.running import PrivateRandom
from replearn.blocks.tracing import trace
from replearn.costs.fake import _as_with_a_gpu
from replearn.costs.precision import float32_products
from replearn.operators._base.operator import Operator


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


def test_who_looks_at_a_whole_block_that_runs_sees_it_as_ever() -> None:
    """Another thread may copy, save or deploy the model at any point of a forward."""
    seen = []

    class Looked(Block):
        def forward(self, x: Tensor) -> Tensor:
            if looking:
                copied = copy.deepcopy(model)  # fails on a tensor with a history
                seen.append((list(model.state_dict()), list(copied.state_dict())))
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    looking, model = False, nn.Sequential(*(Looked() for _ in range(5)))
    replearn.replace_(model, replearn.plan(model))
    looking, keys = True, list(model.state_dict())
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
    assert len(seen) == 10
    assert all(one == other == keys for one, other in seen)
    operators = [block.run.block for block in model if isinstance(block, Operator)]
    assert [block.calls for block in operators] == [2] * len(operators)


def test_switches_of_the_process_are_as_before_whoever_ends_first() -> None:
    """Four threads that set TF32 off and back in any order leave it as it was, and so do costs of a GPU."""

    def switches() -> list[Any]:
        matmul, cudnn, mha = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mha
        return [
            matmul.fp32_precision,
            cudnn.allow_tf32,
            cudnn.benchmark,
            mha.get_fastpath_enabled(),
            torch.cuda.is_bf16_supported,
        ]

    def holders() -> list[AbstractContextManager[Any]]:
        return [float32_products(tf32=False, benchmark=True), plain_encoder_layers(), _as_with_a_gpu()]

    before, filters = switches(), list(warnings.filters)
    for order in itertools.permutations(range(3)):
        held = [holders() for _ in order]
        for one in itertools.chain(*held):
            one.__enter__()
        assert switches() != before
        for number in order:
            for one in held[number]:
                one.__exit__(None, None, None)
        assert switches() == before
        assert warnings.filters == filters


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


def drawn_during(work: Callable[[], None]) -> int:
    """How often another thread drew meanwhile; no number came twice."""
    drawn, done = list[Tensor](), [False]

    def draw() -> None:
        while not done[0]:
            drawn.append(torch.rand(4))

    def until_done() -> None:
        try:
            work()
        finally:
            done[0] = True

    assert errors_of(draw, until_done) == []
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn)
    return len(drawn)


def test_another_thread_draws_the_same_numbers_while_one_deploys() -> None:
    """Neither tracing nor comparing sets the process's random numbers back, so none is drawn twice."""
    model = nn.Sequential(*(Draws() for _ in range(5)))
    replearn.replace_(model, replearn.plan(model)).eval()
    x = torch.randn(3, 8)

    def deploy() -> None:
        for _ in range(4):
            replearn.deploy(model, x, flatten=True)

    assert drawn_during(deploy) > 100


@pytest.mark.parametrize("work", ["calibrate_", "compress", "analyze"])
def test_another_thread_draws_no_number_twice_while_one_fits(work: str) -> None:
    batches = [torch.randn(4, 8) for _ in range(3)]

    def fit() -> None:
        for _ in range(3):
            model = nn.Sequential(*(Block() for _ in range(6))).eval()
            if work == "compress":
                replearn.compress(model, batches, budget="blocks=5")
            elif work == "calibrate_":
                replearn.calibrate_(model, replearn.plan(model), batches)
            else:
                replearn.analysis.analyze(model, replearn.plan(model), batches, gradients=False)

    drawn_during(fit)


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: nn.functional.dropout(x, 0.5, training=True),
        lambda x: torch.normal(x, x.abs()),
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    ],
    ids=["dropout", "normal", "attention"],
)
def test_what_a_thread_draws_for_itself_is_drawn_by_any_function(draws: Callable[[Tensor], Tensor]) -> None:
    """As a model whose dropout stays on in eval mode, and which is deployed."""
    x, before = torch.randn(4, 8), torch.get_rng_state()
    made = []
    for _ in range(2):
        with PrivateRandom():
            made.append(draws(x))
    assert torch.equal(*made)
    assert torch.equal(torch.get_rng_state(), before)


def test_tracing_and_comparing_draw_nothing_from_the_process() -> None:
    model = nn.Sequential(*(Draws() for _ in range(5)))
    replearn.replace_(model, replearn.plan(model)).eval()
    x, before = torch.randn(3, 8), torch.get_rng_state()
    replearn.deploy(model, x, flatten=True)
    assert torch.equal(torch.get_rng_state(), before)
