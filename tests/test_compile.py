"""The sixth law under torch.compile: one graph per mode, no break, no recompilation, and eager's results."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from stacks import OPEN, stack
from tiny import Own
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchvision.models.resnet import Bottleneck
from torchvision.models.vision_transformer import EncoderBlock
from zoo import ZOO

import replearn
from replearn import operators
from replearn.blocks.running import call
from replearn.models.cifar_resnet import BasicBlock
from replearn.operators._base.options import MixingOptions, Options, ReadingOptions

VISION: dict[str, Any] = {
    "bottleneck": lambda: Bottleneck(8, 2),
    "transformer": lambda: EncoderBlock(2, 8, 12, 0.0, 0.0, partial(nn.LayerNorm, eps=1e-6)),
}


def every_operator() -> Iterator[Any]:
    """Each operator as the paper has it, and with everything else switched on."""
    for name, options in operators.available().items():
        kind = options.kinds[-1]
        yield pytest.param(kind, options(), id=f"{name}-{kind}")
        if issubclass(options, ReadingOptions):
            shared = {"coefficients": "shared"} if issubclass(options, MixingOptions) else {}
            yield pytest.param(kind, options(**OPEN, **shared), id=f"{name}-{kind}-all_options")


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def no_compilation(counter: CompileCounterWithBackend) -> Iterator[None]:
    before = counter.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert counter.frame_count == before


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    y = run(x)
    y.square().mean().backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "options"), list(every_operator()))
def test_one_graph_per_mode_with_the_results_of_eager(kind: str, options: Options) -> None:
    model, x = stack(kind, options, **VISION)
    eager = copy.deepcopy(model)
    # aot_eager traces the backward pass too, and takes twice as long: attention_mlp stands for its parts
    thorough = options == type(options)() and options.name not in ("no_weights", "projection", "mlp")
    counter = CompileCounterWithBackend("aot_eager" if thorough else "eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)  # a graph break is an error

    same(gradients(model, x, compiled), gradients(eager, x, eager))
    with no_compilation(counter):
        for _ in range(2):
            same(gradients(model, x, compiled), gradients(eager, x, eager))
    assert counter.frame_count == 1

    model.eval()
    eager.eval()
    same(compiled(x), eager(x))
    with no_compilation(counter):
        before = compiled(x)
        with torch.no_grad():
            for block in (0, 2):  # the sources alone
                for one, other in zip(model[block].parameters(), eager[block].parameters(), strict=True):
                    change = 0.1 * torch.randn_like(one)
                    one.add_(change)
                    other.add_(change)
        same(compiled(x), eager(x))
        assert not torch.allclose(compiled(x), before)
        model.train()
        eager.train()
        same(gradients(model, x, compiled), gradients(eager, x, eager))
    assert counter.frame_count <= 2
    same(dict(model.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize("kind", ["basic", "transformer"])
def test_batches_of_any_size_share_a_dynamic_graph(kind: str) -> None:
    model, x = stack(kind, operators.WholeBlock(), **VISION)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.eval(), backend=counter, fullgraph=True, dynamic=True)
    same(compiled(x), model(x))
    with no_compilation(counter):
        for size in (3, 5, 7):
            batch = torch.randn(size, *x.shape[1:])
            same(compiled(batch), model(batch))


@pytest.mark.parametrize(
    ("name", "options"), [("hf_llama", operators.AttentionMLP()), ("hf_gpt2", operators.WholeBlock())]
)
def test_hugging_face_models_compile_to_one_graph(name: str, options: Options) -> None:
    model, batch = ZOO[name].replaced(options), ZOO[name].batch()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    same(call(compiled, batch).logits, call(model, batch).logits)
    with no_compilation(counter):
        call(compiled, batch)
    assert counter.frame_count == 1


def test_a_whole_training_step_compiles_once_and_trains_as_eager_does() -> None:
    model, x = stack("transformer", operators.HeadWise(stop_gradient=False), **VISION)
    eager = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(train_step, backend=counter)  # in pieces: torch breaks the graph at the optimizer
    optimizers = [torch.optim.SGD(replearn.param_groups(m, 1e-2), lr=0.1, momentum=0.9) for m in (model, eager)]
    for step in range(4):
        if step < 2:  # the optimizer's first step, which makes its state, is another graph than the second
            run(model, optimizers[0], x)
        else:
            with no_compilation(counter):
                run(model, optimizers[0], x)
        train_step(eager, optimizers[1], x)
    same(model.state_dict(), eager.state_dict())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("transformer", operators.HeadWise(correction="low-rank", rank=2)),
        ("any", operators.WholeBlock(stop_gradient=False)),
    ],
)
def test_inductor_computes_what_eager_computes(kind: str, options: Options) -> None:
    model, x = stack(kind, options, **VISION)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model[1], fullgraph=True)  # the operator alone: the blocks would take a minute
    same(gradients(model, x, compiled), gradients(eager, x, eager[1]), 1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(gradients(model, x, compiled), gradients(eager, x, eager[1]), 1e-5)
    same(dict(model.named_buffers()), dict(eager.named_buffers()), 1e-5)


class Layers(nn.Sequential):
    """A class of its own, with code of torch.nn's."""


@pytest.mark.parametrize(
    ("model", "form"),
    [
        (nn.Linear(3, 3), {}),
        (Layers(nn.Linear(3, 3), nn.ReLU()), {}),
        (Own(3), {"flatten": True}),
        (nn.Sequential(Own(3)), {"dtype": torch.bfloat16}),
    ],
    ids=["layer", "derived", "flat", "autocast"],
)
def test_a_compiled_form_is_one_graph(model: nn.Module, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, real = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **how: real(run, backend=counter))
    x = torch.randn(2, 3)
    compiled = replearn.fast.streamline(model.eval(), x, compile=True, **form)
    with torch.no_grad():
        same(compiled(x), replearn.fast.streamline(model, x, **form)(x))
    assert counter.frame_count == 1
    assert list(copy.deepcopy(compiled).state_dict()) == list(compiled.state_dict())


@pytest.mark.parametrize("model", [Own(3), nn.Sequential(Own(3))], ids=["own", "sequential"])
def test_a_mode_reaches_the_compiler(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda call, mode=None, **how: modes.append(mode) or call)
    for compile_ in (False, True, "max-autotune"):
        replearn.fast.streamline(model.eval(), compile=compile_)
    assert list(dict.fromkeys(modes)) == [None, "max-autotune"]


def test_each_model_is_compiled_by_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps what it compiled by code: of code that models share it would ask all, and give up after 8."""
    counter, real, x = CompileCounterWithBackend("eager"), torch.compile, torch.randn(2, 4)
    monkeypatch.setattr(torch, "compile", lambda run, **how: real(run, backend=counter))
    plain = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval() for _ in range(10)]
    models = [replearn.fast.streamline(model, compile=True, dtype=torch.bfloat16) for model in plain]
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for model in models:
            model(x)
    assert counter.frame_count == 10


def one_block(model: Any) -> nn.Module:
    return model.append(torch.compile(BasicBlock(4, 4, 1), backend="eager"))


COMPILED = {
    "torch.compile(model)": (lambda m: torch.compile(m, backend="eager"), "the plain model (model._orig_mod)"),
    "model.compile()": (lambda m: m.compile(backend="eager") or m, "a fresh model, before model.compile()"),
    "one block": (one_block, "a model with model.3._orig_mod in its place"),
    "in place": (lambda m: m[1].compile(backend="eager") or m, "a fresh model, before model.1.compile()"),
    "torch.jit.script": (torch.jit.script, "Start from the Python model"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_is_refused_with_the_cure(how: str) -> None:
    plain = nn.Sequential(*(BasicBlock(4, 4, 1) for _ in range(3))).eval()
    plan = replearn.plan(plain, first=2)
    compile_, cure = COMPILED[how]
    compiled = compile_(plain)
    before = list(compiled.state_dict())
    for door in (replearn.plan, lambda model: replearn.replace_(model, plan)):
        with pytest.raises(replearn.ReplearnError) as caught:
            door(compiled)
        assert cure in str(caught.value)
    assert list(compiled.state_dict()) == before
