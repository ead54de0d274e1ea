"""Copies read their own neighbours: deepcopy, pickle, torch.save and the moving average of weights."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import ZOO, Entry, builds, outputs

import replearn
from replearn.fast.verify import tensors_in
from replearn.operators._base.options import Options, ReadingOptions
from replearn.surgery.replace import plan_of

EVERY_BUILD = [pytest.param(entry, options, id=f"{entry.name}-{options.name}") for entry, options in builds()]


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_average(model: nn.Module) -> nn.Module:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)
    return average.module


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch_save": by_torch_save,
    "average": by_average,
}


def sources_of(model: nn.Module) -> Iterator[Tensor]:
    """Every parameter of the blocks that the operators read."""
    for target in plan_of(model).targets:
        for name in (target.previous, target.next):
            yield from model.get_submodule(name).parameters()


@torch.no_grad()
def change_sources_(model: nn.Module) -> None:
    for parameter in sources_of(model):
        parameter.add_(torch.randn_like(parameter))


@torch.no_grad()
def operators_alone(model: nn.Module, batch: Any) -> Callable[[], list[Tensor]]:
    """The outputs of the operators for what they were given on this batch, whatever changes before them."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((module, args, {k: v for k, v in kwargs.items() if k != "past_key_values"}))  # a cache grows

    names = [target.name for target in plan_of(model).targets]
    handles = [model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True) for name in names]
    outputs(model, batch)
    for handle in handles:
        handle.remove()

    @torch.no_grad()
    def again() -> list[Tensor]:
        return [tensor for module, args, kwargs in calls for tensor in tensors_in(module(*args, **kwargs))]

    return again


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def check_a_copy(entry: Entry, options: Options, make: Callable[[nn.Module], nn.Module]) -> None:
    batch = entry.batch()
    model = entry.replaced(options)
    expected = outputs(model, batch)
    twin = make(model).eval()
    assert plan_of(twin) == plan_of(model)
    assert {t.data_ptr() for t in twin.parameters()}.isdisjoint(t.data_ptr() for t in model.parameters())
    assert equal(outputs(twin, batch), expected)

    theirs, ours = operators_alone(twin, batch), operators_alone(model, batch)
    before, unchanged = theirs(), ours()
    change_sources_(model)
    assert equal(outputs(twin, batch), expected)
    assert equal(theirs(), before)
    moved = outputs(model, batch)
    assert not equal(moved, expected)
    assert equal(ours(), unchanged) == (not isinstance(options, ReadingOptions))

    change_sources_(twin)
    assert equal(outputs(model, batch), moved)
    assert equal(theirs(), before) == (not isinstance(options, ReadingOptions))


@pytest.mark.parametrize(("entry", "options"), EVERY_BUILD)
def test_a_deepcopy_reads_its_own_neighbours(entry: Entry, options: type[Options]) -> None:
    check_a_copy(entry, options(), copy.deepcopy)


# one model of each way to be built and called
DIVERSE = ("cifar_resnet", "timm_vit_swiglu_packed", "swin", "hf_llama")


@pytest.mark.parametrize(("entry", "options"), [b for b in EVERY_BUILD if b.values[0].name in DIVERSE])
@pytest.mark.parametrize("kind", ["pickle", "torch_save", "average"])
def test_any_copy_reads_its_own_neighbours(entry: Entry, options: type[Options], kind: str) -> None:
    check_a_copy(entry, options(), COPIES[kind])


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_a_copy_reads_its_own_neighbours_too(kind: str) -> None:
    entry, batch = ZOO["timm_vit"], ZOO["timm_vit"].batch()
    model = entry.replaced()
    middle = COPIES[kind](model).eval()
    last = COPIES[kind](middle).eval()
    expected = outputs(last, batch)
    change_sources_(middle)
    change_sources_(model)
    assert equal(outputs(last, batch), expected)


@pytest.mark.parametrize("name", ["timm_vit", "hf_llama", "torchvision_basic"])
def test_an_average_follows_training_and_never_moves_it(name: str) -> None:
    """The average's operators read the average's neighbours: its output is that of averaged weights."""
    entry, batch = ZOO[name], ZOO[name].batch()
    model, reference = entry.replaced(), entry.replaced()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    states = []
    for step in range(3):
        torch.manual_seed(step)
        change_sources_(model)
        expected = outputs(model, batch)
        average.update_parameters(model)
        assert equal(outputs(model, batch), expected)
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    mean = states[0]
    for state in states[1:]:
        mean = {
            key: torch.lerp(mean[key], value, 0.5) if value.is_floating_point() else value
            for key, value in state.items()
        }
    reference.load_state_dict(mean)
    torch.testing.assert_close(outputs(average.module.eval(), batch), outputs(reference, batch))


def test_a_copy_can_be_deployed_saved_and_trained(tmp_path: Any) -> None:
    entry, batch = ZOO["timm_vit"], ZOO["timm_vit"].batch()
    model = entry.replaced()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(replearn.param_groups(twin, 1e-4), lr=0.1)
    twin(batch).square().sum().backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    replearn.deploy(twin, example=batch)
    replearn.save(twin, tmp_path / "twin.safetensors")
    loaded = replearn.load(entry.fresh(1), tmp_path / "twin.safetensors")
    assert equal(outputs(loaded, batch), outputs(twin.eval(), batch))
    assert not equal(outputs(loaded, batch), outputs(model, batch))


def test_what_is_made_in_inference_mode_is_trained_outside_of_it(tmp_path: Any) -> None:
    entry, batch = ZOO["cifar_resnet"], ZOO["cifar_resnet"].batch()
    replaced, loaded, fitted = entry.fresh(), entry.fresh(), entry.fresh()
    plan = replearn.plan(replaced, first=2)
    with torch.inference_mode():
        replearn.replace_(replaced, plan)
        replearn.save(replaced, tmp_path / "run.safetensors")
        replearn.load(loaded, tmp_path / "run.safetensors")
        replearn.calibrate_(fitted, plan, [batch, batch])
        made = [replearn.deploy(replaced, batch, merge=True), replearn.deploy(fitted, batch, flatten=True)]
        assert torch.is_inference_mode_enabled()
    for model in (replaced, loaded, fitted, *made):
        model.train()(batch).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


class Writes(nn.Module):
    """Counts its calls in a buffer, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.last(x.relu_())


def test_models_and_examples_that_are_made_in_inference_mode_may_be_written_to() -> None:
    with torch.inference_mode():
        model, example = Writes().eval(), torch.randn(2, 3)
        plain = replearn.fast.streamline(model, example)
        assert float(model.calls) == 0
    assert not any(tensor.is_inference() for tensor in (*plain.parameters(), *plain.buffers()))
    plain(torch.randn(2, 3)).sum().backward()


@pytest.mark.parametrize(
    "replace", [replearn.replace_, lambda *given: replearn.calibrate_(*given, [torch.rand(5, 3, 8, 8)])]
)
def test_an_optimizer_made_before_the_replacement_is_warned_of(replace: Any) -> None:
    model, late = tiny.resnet(32).eval(), tiny.resnet(32).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"An optimizer, SGD, holds parameters of layer1\.3.*after") as caught:
        replace(model, replearn.plan(model))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(late, replearn.plan(late))
    del optimizer
