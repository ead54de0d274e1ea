"""Gradients of weights that are computed beside the rest: the same numbers, and nobody reads them too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import HERE, interpret, runs_kernels
from torch import Tensor, nn

import replearn
from replearn import operators
from replearn.experiments.training.architectures import architecture
from replearn.fast.graphs import capture as capturing
from replearn.fast.synthesis import ahead as synthesizing
from replearn.fast.synthesis import fused
from replearn.fast.train import overlapped_wgrad as late_gradients
from replearn.fast.train import side_stream as besides
from replearn.fast.train.overlapped_wgrad import find_late, late_weight_gradients
from replearn.fast.verify import tensors_in
from replearn.operators import basic
from replearn.operators._base import operator as base

LAST = torch.channels_last
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """A step that is recorded, in which what runs beside is there when it was waited for, and not before."""
    waiting: list[tuple[Tensor, Tensor]] = []
    made: list[Tensor] = []

    @torch.no_grad()
    def later(work: Callable[[], Any], *read: Tensor, further: bool = False) -> Any:
        if not further:
            wait(read[0].device)
        for empty, full in waiting:  # there they can be read, and nowhere else
            empty.copy_(full)
        now = work()
        waiting.extend((each, each.clone()) for each in tensors_in(now))
        for empty, _ in waiting:
            empty.fill_(float("nan"))
        made.extend(tensors_in(now))
        return now

    @torch.no_grad()
    def wait(device: torch.device) -> None:
        while waiting:
            empty, full = waiting.pop(0)
            empty.copy_(full)

    monkeypatch.setattr(capturing._here, "recording", True)
    for module in (late_gradients, fused):
        monkeypatch.setattr(module, "beside", later)
        monkeypatch.setattr(module, "wait", wait)
    yield made
    assert not waiting


def learned(model: nn.Module, loss: Callable[[nn.Module], Tensor], *, late: bool) -> list[Tensor | None]:
    model.zero_grad()
    if late:
        with late_weight_gradients(model):
            loss(model).backward()
    else:
        loss(model).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same_either_way(model: nn.Module, loss: Callable[[nn.Module], Tensor], within: float = 0) -> None:
    expected, found = (learned(model, loss, late=late) for late in (False, True))
    torch.testing.assert_close(found, expected, rtol=within, atol=within)


def test_a_network_learns_the_same_from_gradients_that_come_late(late: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = replearn.models.resnet32()
    x = torch.randn(4, 3, 32, 32)
    same_either_way(model, lambda model: model(x).square().sum())
    assert len(late) == sum(isinstance(module, nn.Conv2d) for module in model.modules())


HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1},
    "oblong": {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)},
    "in groups": {"groups": 3},
    "every channel alone": {"groups": 6, "padding": 1},
}


@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("order", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("low", [False, True])
def test_a_convolution_of_any_kind(name: str, order: torch.memory_format, low: bool, late: list[Tensor]) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 12, 3, bias=False, **HOWS[name]).to(memory_format=order)  # type: ignore[call-overload]
    x = torch.randn(2, 6, 9, 8).contiguous(memory_format=order).requires_grad_()

    def loss(conv: nn.Module) -> Tensor:
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            made: Tensor = conv(x)
        assert made.dtype is (torch.bfloat16 if low else torch.float32)
        return made.float().square().sum()

    expected = learned(conv, loss, late=False), x.grad
    assert not late
    torch.testing.assert_close((learned(conv, loss, late=True), x.grad), expected, rtol=0, atol=0)
    assert late


class Twice(nn.Module):
    """A convolution that is called twice, as in the heads of detectors; and one that shares its weight."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False) if shared else self.first
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x).relu())
        return made


@pytest.mark.parametrize("shared", [False, True])
def test_a_weight_that_is_used_twice_is_not_late(shared: bool, late: list[Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 5)
    same_either_way(Twice(shared), lambda model: model(x).square().sum())
    assert not late


def test_what_else_depends_on_a_weight_is_added_when_both_are_there(late: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False))
    x = torch.randn(2, 4, 9, 9)
    same_either_way(model, lambda model: model(x).square().sum() + model[0].weight.square().sum())
    assert late


def test_hooks_hear_of_gradients_that_are_complete(late: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False))
    heard: list[Tensor] = []
    model[0].weight.register_hook(lambda grad: heard.append(grad.clone()))
    model[2].weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))  # type: ignore[union-attr]
    x = torch.randn(2, 4, 9, 9)
    same_either_way(model, lambda model: model(x).square().sum())
    assert late
    assert len(heard) == 4
    assert all(bool(grad.isfinite().all()) for grad in heard)


def test_gradients_are_added_to_those_that_are_there(late: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(4, 4, 3, bias=False)
    x = torch.randn(2, 4, 9, 9)
    once = learned(model, lambda model: model(x).square().sum(), late=False)[0]
    with late_weight_gradients(model):
        model(x).square().sum().backward()
    assert once is not None
    torch.testing.assert_close(model.weight.grad, 2 * once)


@pytest.mark.parametrize("stop_gradient", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_operators_and_the_neighbours_they_read_learn_the_same(
    stop_gradient: bool, recompute: bool, late: list[Tensor]
) -> None:
    torch.manual_seed(0)
    model = replearn.models.resnet32()
    operator = operators.Basic(stop_gradient=stop_gradient, recompute=recompute)
    replearn.replace_(model, replearn.plan(model, interval=4, operator=operator))
    x = torch.randn(4, 3, 32, 32)

    def loss(model: nn.Module) -> Tensor:
        with replearn.fast.synthesized(model):
            made: Tensor = model(x)
        return made.square().sum()

    same_either_way(model, loss, within=0 if stop_gradient else 1e-4)  # three gradients are added in another order
    assert late


def test_what_is_frozen_or_has_a_bias_is_left_alone(late: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False))
    assert find_late(model) == [model[2]]
    model[2].weight.requires_grad_(False)
    assert not find_late(model)
    x = torch.randn(2, 4, 9, 9)
    same_either_way(model, lambda model: model(x).square().sum())
    assert not late
    assert model[2].weight.grad is None


def test_where_nothing_is_recorded_nothing_is_late(late: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing._here, "recording", False)
    model = nn.Conv2d(4, 4, 3, bias=False)
    same_either_way(model, lambda model: model(torch.ones(1, 4, 5, 5)).square().sum())
    assert not late


def test_what_breaks_off_leaves_nothing_behind(late: list[Tensor]) -> None:
    model = nn.Conv2d(4, 4, 3, bias=False)

    def breaks_off() -> None:
        with late_weight_gradients(model):
            model(torch.ones(1, 4, 5, 5))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks_off()
    assert late_gradients.behind_gate(model.weight) is model.weight
    same_either_way(model, lambda model: model(torch.ones(1, 4, 5, 5)).square().sum())


def test_wrong_input_is_refused_in_torchs_words(late: list[Tensor]) -> None:
    model = nn.Conv2d(4, 4, 3, bias=False)
    for wrong in (torch.ones(1, 3, 5, 5), torch.ones(1, 4, 5, 5).double()):
        with pytest.raises(RuntimeError) as expected:
            model(wrong)
        with pytest.raises(RuntimeError) as found, late_weight_gradients(model):
            model(wrong)
        assert str(found.value) == str(expected.value)
    assert not late


def slowly(work: Callable[[], Any], *read: Tensor, further: bool = False) -> Any:
    """Beside, and so late that whoever does not wait finds something else."""

    def after_a_while() -> Any:
        torch.cuda._sleep(1_000_000)
        return work()

    return besides.beside(after_a_while, *read, further=further)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("name", ["resnet32", "resnet34"])
@pytest.mark.parametrize("operator", [None, {}, {"stop_gradient": False}, {"recompute": True}])
@pytest.mark.parametrize("slow", [False, True])
def test_a_captured_step_learns_bit_for_bit_the_same(
    name: str, operator: dict[str, bool] | None, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replearn.experiments.training.step import CapturedStep

    if slow:
        for module in (late_gradients, fused):
            monkeypatch.setattr(module, "beside", slowly)
    x = torch.randn(64, 3, 32, 32, device="cuda").contiguous(memory_format=LAST)
    labels = torch.arange(64, device="cuda") % 10
    added = operator == {"stop_gradient": False}  # three gradients of a weight, in another order

    def trained(late: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        net: Any = architecture(name, num_classes=10, size=32).cuda().to(memory_format=LAST)
        if operator is not None:
            options = operators.Basic(**operator)
            replearn.replace_(net, replearn.plan(net, interval=4, first=2, operator=options))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        loss = torch.zeros((), device="cuda")

        def body() -> None:
            optimizer.zero_grad(set_to_none=True)
            together = nullcontext() if operator is None else replearn.fast.synthesized(net)
            beside = late_weight_gradients(net) if late else nullcontext()
            with replearn.fast.narrow_convolutions(net), replearn.fast.fused_norms(net), beside:
                with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), together:
                    now = F.cross_entropy(net(x), labels)
                now.backward()
            loss.copy_(now.detach())
            optimizer.step()

        step = CapturedStep(body, net, optimizer, [loss])
        found = []
        for _ in range(1 if added else 20):
            step()
            found.append(loss.clone())
        return [torch.stack(found), *(p.detach().clone() for p in net.parameters())], step.peak_memory

    torch.backends.cudnn.benchmark, before = False, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, exact = True, torch.backends.cudnn.deterministic
    try:
        (plain, usual), (found, memory) = trained(False), trained(True)
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before, exact
    if added:
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    else:
        assert bool(plain[0][-1] < plain[0][0])
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert memory < usual + 2**27  # cuDNN takes room to work in for either stream


@pytest.mark.cuda
@needs_gpu
def test_what_runs_beside_is_there_after_waiting_and_its_memory_is_kept_until_then() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    expected = x.double().sum(0).float()
    for _ in range(5):
        copied = x.clone()

        def work(copied: Tensor = copied) -> Tensor:
            torch.cuda._sleep(20_000_000)
            return copied.sum(0)

        made = besides.beside(work, copied)
        del copied, work
        others = [torch.zeros_like(x) for _ in range(3)]  # where the copy would be if it were not kept
        besides.wait(x.device)
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-2)
        del others


@runs_kernels
@pytest.mark.parametrize("alone", [True, False])
def test_narrow_convolutions_are_late_too(alone: bool, late: list[Tensor]) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(HERE, memory_format=LAST)  # type: ignore[call-overload]
    x = torch.randn(2, 16, 8, 8, device=HERE).contiguous(memory_format=LAST)

    def loss(conv: nn.Module) -> Tensor:
        # the interpreter multiplies bfloat16 as integers
        with replearn.fast.narrow_convolutions(conv), torch.autocast(HERE, torch.float16):
            made = conv(x) if alone else conv(conv(x))
        return made.float().square().sum()

    same_either_way(conv, loss)
    assert len(late) == alone


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are made by the kernels, as on a GPU."""

    def synthesize(mixtures: Any, dtype: torch.dtype) -> Any:
        wanted = {name: mixture for name, mixture in mixtures.items() if mixture is not None}
        return fused.synthesize_fused(wanted, dtype) if wanted else {}

    monkeypatch.setattr(synthesizing, "kernels_run_on", lambda tensor: True)
    for module in (base, synthesizing):
        monkeypatch.setattr(module, "synthesize", synthesize)


def small_resnet(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = replearn.models.CifarResNet(20, width=4).to(HERE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # so that two passes are alike
    return replearn.replace_(model, replearn.plan(model, interval=2, operator=operators.Basic(**options)))


def small_transformer(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(HERE)
    return replearn.replace_(model, replearn.plan(model, interval=2, operator=operators.Projection(**options)))


def pictures(number: int = 0) -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8, device=HERE).sin().view(2, 3, 8, 8) + number


def once(model: nn.Module) -> Tensor:
    with replearn.fast.synthesized(model):
        return model(pictures()).square().sum()  # type: ignore[no-any-return]


def in_half(model: nn.Module) -> Tensor:
    with torch.autocast(HERE, torch.bfloat16, cache_enabled=False):
        return once(model)


def one_by_one(model: nn.Module) -> Tensor:
    return model(pictures()).square().sum()  # type: ignore[no-any-return]


def two_passes(model: nn.Module) -> Tensor:
    with replearn.fast.synthesized(model):
        return model(pictures()).square().sum() + model(pictures(1)).square().sum()  # type: ignore[no-any-return]


def two_steps(model: nn.Module) -> Tensor:
    return once(model) + once(model)


def asked_without_gradients(model: nn.Module) -> Tensor:
    with replearn.fast.synthesized(model):
        with torch.inference_mode():
            model(pictures())
        return model(pictures()).square().sum()  # type: ignore[no-any-return]


def with_decay(model: nn.Module) -> Tensor:
    return once(model) + sum(parameter.square().sum() for parameter in model.parameters())


def tokens(model: nn.Module) -> Tensor:
    words = torch.linspace(-2, 2, 2 * 5 * 16, device=HERE).cos().view(2, 5, 16)
    with torch.autocast(HERE, torch.bfloat16, cache_enabled=False), replearn.fast.synthesized(model):
        made: Tensor = model(words)
    return made.float().square().sum()


MIXED: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Callable[[nn.Module], Tensor]]] = {
    "once": (small_resnet, {}, once),
    "once in bfloat16": (small_resnet, {}, in_half),
    "once in bfloat16, neighbours learn": (small_resnet, {"stop_gradient": False}, in_half),
    "recomputed in bfloat16": (small_resnet, {"recompute": True}, in_half),
    "one by one": (small_resnet, {}, one_by_one),
    "two passes": (small_resnet, {}, two_passes),
    "two steps, one backward pass": (small_resnet, {}, two_steps),
    "first asked without gradients": (small_resnet, {}, asked_without_gradients),
    "neighbours learn": (small_resnet, {"stop_gradient": False}, once),
    "neighbours learn, one by one": (small_resnet, {"stop_gradient": False}, one_by_one),
    "a correction of low rank": (small_resnet, {"correction": "low-rank", "rank": 2}, once),
    "a full correction, neighbours learn": (small_resnet, {"correction": "full", "stop_gradient": False}, once),
    "recomputed": (small_resnet, {"recompute": True}, once),
    "decayed": (small_resnet, {"stop_gradient": False}, with_decay),
    "projections": (small_transformer, {}, tokens),
    "projections, a correction of low rank": (small_transformer, {"correction": "low-rank", "rank": 2}, tokens),
    "projections, neighbours learn": (small_transformer, {"stop_gradient": False}, tokens),
}


@runs_kernels
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.usefixtures("by_kernels")
def test_operators_mixed_by_kernels_learn_the_same(name: str, late: list[Tensor]) -> None:
    build, options, loss = MIXED[name]
    same_either_way(build(**options), loss, within=1e-4)
    assert late or name in ("two steps, one backward pass", "projections, a correction of low rank")


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]  # type: ignore[no-any-return]


def written(weight: Tensor) -> Tensor:
    room = torch.zeros(2, *weight.shape, dtype=weight.dtype, device=weight.device)
    room[0] = weight
    return room


def heard(weight: Tensor) -> Tensor:
    weight.register_hook(lambda grad: 2 * grad)
    return weight.new_zeros(())


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": torch.square,
    "a function": Squared.apply,
    "written into another": written,
    "an image": lambda weight: F.conv2d(weight, weight.new_ones(4, weight.shape[1], 1, 1)),
    "mapped": torch.func.vmap(torch.square),
    "a hook": heard,
}


@runs_kernels
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("low", [True, False])
def test_mixed_weights_may_be_used_for_something_else_too(
    low: bool, name: str, late: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made_before = small_resnet(), basic.BasicOperator.synthesized
    extra: list[Tensor] = []

    def watched(self: Any, x: Tensor) -> Any:
        made = made_before(self, x)
        extra.append(OTHERS[name](made["kernel"]).float().sum())
        return made

    monkeypatch.setattr(basic.BasicOperator, "synthesized", watched)

    def loss(model: nn.Module) -> Tensor:
        extra.clear()
        with torch.autocast(HERE, torch.bfloat16, enabled=low):
            found = once(model)
        return found.float() + sum(extra)

    same_either_way(model, loss, within=1e-4)
    operators_late = 0 if name == "a hook" else len(extra)
    # and the coefficients of each operator, in any case
    assert len(late) == len(find_late(model)) + operators_late + 2 * len(extra)


def test_a_gate_on_another_stream_is_not_taken(late: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(4, 4, 3, bias=False)
    with late_weight_gradients(conv):
        assert late_gradients.behind_gate(conv.weight) is not conv.weight
        monkeypatch.setattr(besides, "stream_of", lambda device: 7)
        assert late_gradients.behind_gate(conv.weight) is conv.weight
        assert late_gradients.mixed_behind_gate([conv.weight]) is None


def test_the_kernels_run_in_tritons_interpreter() -> None:
    interpret(__file__, "narrow or mixed")


def test_float64_stays_what_it_is_under_autocast(late: list[Tensor]) -> None:
    conv = nn.Conv2d(4, 4, 3, bias=False).double()
    x = torch.randn(1, 4, 5, 5).double()
    with late_weight_gradients(conv), torch.autocast("cpu", torch.bfloat16):
        made = conv(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(made, conv(x), rtol=0, atol=0)


def test_a_weight_that_is_changed_inside_counts_as_it_is(late: list[Tensor]) -> None:
    conv = nn.Conv2d(4, 4, 3, bias=False)
    x = torch.randn(1, 4, 5, 5)
    with late_weight_gradients(conv):
        conv.weight.data = torch.zeros_like(conv.weight)
        assert not conv(x).any()
        conv.weight.data = conv.weight.data[:, :, :2]
        assert conv(x).shape == (1, 4, 4, 3)
        conv.weight.requires_grad_(False)
        assert not conv(x).requires_grad


def test_it_may_be_entered_without_gradients_and_inside_another(late: list[Tensor]) -> None:
    first, second = (nn.Conv2d(4, 4, 3, bias=False) for _ in range(2))
    both = nn.Sequential(first, second)
    x = torch.randn(1, 4, 9, 9)
    expected = learned(both, lambda model: model(x).square().sum(), late=False)
    both.zero_grad()
    with torch.no_grad(), late_weight_gradients(first), late_weight_gradients(second), torch.enable_grad():
        both(x).square().sum().backward()
    assert len(late) == 2
    torch.testing.assert_close([first.weight.grad, second.weight.grad], expected, rtol=0, atol=0)


class Marked(Tensor):
    """A tensor of another class, which convolves in its own way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            return "mine"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_torch_knows_better_is_left_to_torch(late: list[Tensor]) -> None:
    conv = nn.Conv2d(4, 4, 3, bias=False)
    x = torch.randn(1, 4, 6, 6)
    with late_weight_gradients(conv):
        assert conv(x.as_subclass(Marked)) == "mine"
        assert F.conv2d(x, conv.weight, padding="same").shape == x.shape
        assert F.conv2d(x[0], conv.weight).shape == (4, 4, 4)
        with pytest.raises(RuntimeError):
            F.conv2d(x, conv.weight, stride=())
        assert conv.to("meta")(x.to("meta")).shape == (1, 4, 4, 4)
    assert not late
