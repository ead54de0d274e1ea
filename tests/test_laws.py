"""The laws of replacement, over every family of the zoo and every operator that suits it.

The sixth (compiled, autocast, distributed) has test files of its own; copies, the fifth, are in test_copies.py.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from zoo import ZOO, Entry, apart, builds, everything, outputs, shake_

import replearn
from replearn import ReplearnError, operators
from replearn.blocks.running import call
from replearn.fast.verify import tensors_in
from replearn.operators._base.options import Options


@dataclass
class Built:
    """A model that went through `replace_`, and what it was before."""

    entry: Entry
    plan: replearn.Plan
    before: dict[str, Tensor]  # the state dict, copied
    parameters: dict[str, nn.Parameter]  # of kept blocks, by identity
    after: dict[str, Tensor]  # the state dict, copied right after surgery
    removed: list[weakref.ref[Tensor]]
    model: nn.Module  # moved away from its starting values
    double: nn.Module  # the same in float64

    @cached_property
    def plain(self) -> nn.Module:
        return replearn.deploy(self.model)


@pytest.fixture(
    scope="module", params=[pytest.param(build, id=f"{build[0].name}-{build[1].name}") for build in builds()]
)
def built(request: pytest.FixtureRequest) -> Built:
    entry, options = request.param
    return build(entry, options())


def build(entry: Entry, options: Options, first: int = 2) -> Built:
    model = entry.fresh()
    plan = replearn.plan(model, first=first, operator=options)
    gone = tuple(f"{target.name}." for target in plan.targets)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = {n: p for n, p in model.named_parameters(remove_duplicate=False) if not n.startswith(gone)}
    removed = [weakref.ref(t) for target in plan.targets for t in tensors_of(model.get_submodule(target.name))]
    replearn.replace_(model, plan)
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shake_(model, 0.02)
    return Built(entry, plan, before, parameters, after, removed, model, copy.deepcopy(model).double())


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to the largest value, over all outputs."""
    assert len(found) == len(expected) > 0
    assert all(tensor.isfinite().all() for tensor in expected)
    return max(map(apart, expected, found))


# Law 1: plan leaves the model bit-identical, and works on the meta device


@cache
def fresh(name: str) -> nn.Module:
    """A model that no test changes."""
    return ZOO[name].fresh()


@cache
def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return ZOO[name].build()


EVERY_BUILD = [pytest.param(entry, options, id=f"{entry.name}-{options.name}") for entry, options in builds()]


@pytest.mark.parametrize(("entry", "options"), EVERY_BUILD)
def test_law_1_a_plan_leaves_no_trace_and_is_the_same_on_meta(entry: Entry, options: type[Options]) -> None:
    model = fresh(entry.name).train()
    next(model.children()).eval()
    model.register_forward_hook(lambda *_: None)
    before, held = everything(model), [sys.getrefcount(tensor) for tensor in tensors_of(model)]
    plan = replearn.plan(model, first=2, operator=options())
    assert [sys.getrefcount(tensor) for tensor in tensors_of(model)] == held  # nor does garbage hold them
    assert everything(model) == before
    meta = on_meta(entry.name)
    assert replearn.plan(meta, first=2, operator=options()) == plan
    assert all(tensor.is_meta for tensor in tensors_of(meta))


@pytest.mark.parametrize("name", ZOO)
def test_law_1_a_plan_by_similarity_leaves_no_trace_either(name: str) -> None:
    model = fresh(name).train()
    before = everything(model)
    replearn.plan(model, budget="blocks=1", score="similarity", data=[ZOO[name].batch()])
    assert everything(model) == before


# Law 2: the number of trainable parameters is the plan's, exactly


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_law_2_the_plan_counts_trainable_parameters_exactly(built: Built) -> None:
    assert trainable(built.model) == built.plan.parameters_after
    assert trainable(built.entry.build()) == built.plan.parameters_before
    for target in built.plan.targets:
        operator = built.model.get_submodule(target.name)
        assert trainable(operator) == target.parameters_after
        assert sum(p.numel() for p in operator.fuse().parameters()) == target.parameters_deployed


@pytest.mark.parametrize("name", ZOO)
def test_law_2_holds_with_frozen_and_tied_parameters(name: str) -> None:
    model = ZOO[name].fresh()
    blocks = [model.get_submodule(block) for stack in replearn.find_stacks(model) for block in stack.blocks[:4]]
    for block in blocks[::2]:  # the first and the third block of each stack, both sources
        block.requires_grad_(False)
    tied = next(key for key, _ in blocks[1].named_parameters())
    module, _, leaf = tied.rpartition(".")
    for other in (blocks[2], blocks[3]) if len(blocks) > 3 else (blocks[2],):
        shared = blocks[1].get_parameter(tied)
        if other.get_parameter(tied).shape == shared.shape:  # a removed block's parameter, shared with a kept one
            setattr(other.get_submodule(module), leaf, shared)
    before = trainable(model)
    plan = replearn.plan(model, first=2)
    replearn.replace_(model, plan)
    assert plan.parameters_before == before
    assert plan.parameters_after == trainable(model) < before


# Law 3: removed blocks are gone


def test_law_3_removed_blocks_are_gone(built: Built) -> None:
    assert built.removed
    if any(reference() is not None for reference in built.removed):
        gc.collect()
    assert [reference() for reference in built.removed if reference() is not None] == []
    for target in built.plan.targets:
        theirs = {name for name in built.before if name.startswith(f"{target.name}.")}
        own = {f"{target.name}.{name}" for name in built.model.get_submodule(target.name).state_dict()}
        assert {name for name in built.after if name.startswith(f"{target.name}.")} == own
        # a key of the same name is a new tensor, which starts at a value of its own
        for name in theirs & own:
            assert built.before[name].numel() == 1 or not torch.equal(built.before[name], built.after[name])


@pytest.mark.parametrize("name", ["cifar_resnet", "timm_vit", "hf_llama"])
@pytest.mark.parametrize("operator", [None, operators.WholeBlock()], ids=["default", "whole_block"])
def test_law_3_their_gradients_are_gone_too(name: str, operator: Options | None) -> None:
    model = ZOO[name].fresh()
    sum(tensor.sum() for tensor in tensors_in(call(model, ZOO[name].batch()))).backward()
    plan = replearn.plan(model, first=2, operator=operator)
    blocks = [model.get_submodule(target.name) for target in plan.targets]
    references = [weakref.ref(p.grad) for block in blocks for p in block.parameters() if p.grad is not None]
    references += [weakref.ref(module) for block in blocks for module in block.modules()]
    assert len(references) > 10
    del blocks
    replearn.replace_(model, plan)
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


# Law 4: kept blocks keep their keys; nothing appears twice; safetensors takes it


def test_law_4_kept_blocks_keep_their_keys_and_values(built: Built, tmp_path: Path) -> None:
    gone = tuple(f"{target.name}." for target in built.plan.targets)
    kept = {name for name in built.before if not name.startswith(gone)}
    assert {name for name in built.after if not name.startswith(gone)} == kept
    for name in kept:
        assert torch.equal(built.before[name], built.after[name]), name
    now = dict(built.model.named_parameters(remove_duplicate=False))
    assert all(now[name] is parameter for name, parameter in built.parameters.items())

    places: dict[int, list[str]] = {}
    for name, tensor in built.model.state_dict().items():
        places.setdefault(tensor.data_ptr(), []).append(name)
    twice = [names for names in places.values() if len(names) > 1]
    tied = set(getattr(built.model, "all_tied_weights_keys", None) or ())  # Hugging Face's own
    assert all(set(names) & tied for names in twice), twice
    state = {name: tensor for name, tensor in built.model.state_dict().items() if name not in tied}
    save_file(state, tmp_path / "plain.safetensors")
    assert load_file(tmp_path / "plain.safetensors").keys() == state.keys()


# Surgery leaves the rest of the model as it was


KEPT = [
    pytest.param(ZOO[name], options, id=f"{name}-{options.name if options else 'default'}")
    for name in ("torchvision_bottleneck", "timm_vit", "hf_llama", "swin", "decoder")
    for options in (None, operators.WholeBlock(), operators.AttentionMLP(attention="head_wise"))
    if options is None or ZOO[name].suits(type(options))
]


@pytest.mark.parametrize(("entry", "operator"), KEPT)
def test_hooks_frozen_parameters_and_modes_of_kept_blocks_survive(entry: Entry, operator: Options | None) -> None:
    model = entry.fresh().train()
    plan = replearn.plan(model, first=2, operator=operator)
    (target,) = plan.targets
    previous, following = model.get_submodule(target.previous), model.get_submodule(target.next)
    calls: list[nn.Module] = []
    watched = [*previous.modules(), *following.modules()]  # their norms too, which an operator may borrow
    for module in watched:
        module.register_forward_hook(lambda module, *_: calls.append(module))
    call(model, entry.batch())
    expected = list(calls)
    assert previous in expected
    assert following in expected
    for parameter in list(previous.parameters())[::2]:
        parameter.requires_grad_(False)
    following.eval()
    model.get_submodule(target.name).eval()
    modes = {m: m.training for m in model.modules()}
    frozen = {p for p in model.parameters() if not p.requires_grad}
    calls.clear()

    replearn.replace_(model, replearn.plan(model, first=2, operator=operator))
    assert {p for p in model.parameters() if not p.requires_grad} == frozen
    assert all(modes.get(module, False) == module.training for module in model.modules())
    call(model, entry.batch())
    assert calls == expected


def test_a_module_shared_by_the_blocks_stays_shared_by_those_that_are_kept() -> None:
    model = ZOO["sequential"].fresh()
    norm = nn.LayerNorm(16)
    for block in model:
        block.norm = norm
    expected = model[2](torch.ones(1, 16))
    plan = replearn.plan(model, first=2)
    replearn.replace_(model, plan)
    assert model[0].norm is model[2].norm is model[3].norm is norm
    assert torch.equal(model[2](torch.ones(1, 16)), expected)
    assert plan.parameters_after == trainable(model)
    replearn.deploy(model.eval(), example=ZOO["sequential"].batch())


# Law 7: deploy gives plain modules with the same outputs, and touches nothing


def test_law_7_the_deployed_model_is_equal_in_float32(built: Built) -> None:
    batch = built.entry.batch()
    assert not any(module.training for module in built.plain.modules())
    assert largest_difference(outputs(built.plain, batch), outputs(built.model, batch)) < 1e-5


def test_law_7_the_deployed_model_is_equal_in_float64(built: Built) -> None:
    batch = doubled(built.entry.batch())
    found, expected = outputs(replearn.deploy(built.double), batch), outputs(built.double, batch)
    assert all(tensor.dtype is torch.float64 for tensor in found)
    assert largest_difference(found, expected) < 1e-12


def doubled(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: doubled(tensor) for name, tensor in batch.items()}
    return batch.double() if batch.is_floating_point() else batch


def test_law_7_deploy_does_not_touch_its_input(built: Built) -> None:
    before = everything(built.model)
    plain = replearn.deploy(built.model)
    assert everything(built.model) == before
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(built.model)} - {0}
    assert own.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in tensors_of(plain))


def test_law_7_a_deployed_model_needs_nothing_of_ours(built: Built) -> None:
    assert {name: type(m).__qualname__ for name, m in built.plain.named_modules() if from_replearn(m)} == {}
    if built.entry.family not in ("cifar_resnet", "mine"):  # whose own classes carry an anatomy
        assert b"replearn" not in pickle.dumps(built.plain)


@pytest.mark.parametrize(
    ("entry", "options"),
    [b for b in EVERY_BUILD if b.values[0].name in ("timm_vit", "swin", "timm_resnet", "torchvision_bottleneck")],
)
def test_law_7_timm_fuses_what_deploy_does(entry: Entry, options: type[Options], tmp_path: Path) -> None:
    from timm.utils.model import reparameterize_model

    model = entry.replaced(options())
    before = everything(model)
    fused = reparameterize_model(model)
    assert everything(model) == before
    assert not any(from_replearn(module) for module in fused.modules())
    plain, batch = replearn.deploy(model, fold="operators"), entry.batch()
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, outputs(fused, batch), outputs(plain, batch)))
    assert largest_difference(outputs(replearn.deploy(model), batch), outputs(fused, batch)) < 1e-5
    reader = Reading(io.BytesIO(pickle.dumps(fused)))
    reader.load()
    assert "replearn" not in reader.packages  # so torch.load reads it where replearn is not installed
    for door in (replearn.deploy, lambda model: replearn.save(model, tmp_path / "fused.safetensors")):
        with pytest.raises(ReplearnError, match="are plain modules already, as timm's reparameterize_model"):
            door(fused)


class Reading(pickle.Unpickler):
    """Notes whose classes and functions a pickle asks for."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.packages: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.packages.add(module.partition(".")[0])
        return super().find_class(module, name)


def from_replearn(module: nn.Module) -> bool:
    where = type(module).__module__
    return where.startswith("replearn") and not where.startswith("replearn.models")


# Law 8: a plan survives JSON; a checkpoint carries it and loads onto a fresh model


def test_law_8_a_plan_survives_json(built: Built) -> None:
    text = built.plan.to_json()
    assert replearn.Plan.from_json(text) == built.plan
    assert replearn.Plan.from_json(json.dumps(json.loads(text), indent=2)) == built.plan


def test_law_8_a_checkpoint_loads_onto_a_fresh_model(built: Built, tmp_path: Path) -> None:
    replearn.save(built.model, tmp_path / "run.safetensors")
    other = built.entry.fresh(seed=1)
    loaded = replearn.load(other, tmp_path / "run.safetensors")
    assert loaded is other
    expected = built.model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    batch = built.entry.batch()
    assert all(map(torch.equal, outputs(loaded, batch), outputs(built.model, batch)))


# The same with options other than the defaults, for one model of each kind

CHANGES: dict[str, dict[str, Any]] = {
    "full": {"correction": "full", "stop_gradient": False},
    "low_rank": {"correction": "low-rank", "rank": 2, "sources": "previous"},
    "next": {"sources": "next"},
    "shared": {"coefficients": "shared", "start": 0.5},
}
CHANGED = [
    pytest.param(ZOO[name], options(**changes), id=f"{name}-{options.name}-{label}")
    for name in ("torchvision_basic", "torchvision_resnext", "timm_vit_swiglu_packed", "hf_gpt2", "swin")
    for options in operators.available().values()
    for label, changes in CHANGES.items()
    if ZOO[name].suits(options) and changes.keys() <= {field.name for field in fields(options)}
]


@pytest.mark.parametrize(("entry", "options"), CHANGED)
def test_the_laws_hold_with_other_options(entry: Entry, options: Options, tmp_path: Path) -> None:
    built, batch = build(entry, options, first=3), entry.batch()
    assert trainable(built.model) == built.plan.parameters_after
    assert replearn.Plan.from_json(built.plan.to_json()) == built.plan
    expected = outputs(built.model, batch)
    assert largest_difference(outputs(built.plain, batch), expected) < 1e-5
    found, exact = outputs(replearn.deploy(built.double), doubled(batch)), outputs(built.double, doubled(batch))
    assert largest_difference(found, exact) < 1e-12
    replearn.save(built.model, tmp_path / "run.safetensors")
    loaded = replearn.load(entry.fresh(seed=1), tmp_path / "run.safetensors")
    assert all(map(torch.equal, outputs(loaded, batch), expected))
    twin = copy.deepcopy(built.model)
    shake_(built.model, 0.5)
    assert all(map(torch.equal, outputs(twin, batch), expected))


# Blocks that are built in unusual ways, which only the whole-block operator takes


class Twisted(nn.Module):
    """One norm under two names, two layers with one weight, a scalar, and a method kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.after = nn.LayerNorm(16)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.run = self.twice
        self.inner = self.one.forward

    def twice(self, x: Tensor) -> Tensor:
        return self.after(self.two(self.inner(self.before(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.run(x)


class Branched(nn.Module):
    """As in RepVGG: the first block of a stage lacks a branch that the others have."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.branch = nn.BatchNorm2d(3) if branch else None

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if self.branch is None else self.conv(x) + self.branch(x)


@pytest.mark.parametrize("correction", ["none", "low-rank", "full"])
def test_a_whole_block_with_shared_layers_tied_weights_and_kept_methods(correction: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Twisted() for _ in range(4))).eval(), torch.randn(2, 16)
    references = [weakref.ref(parameter) for parameter in model[1].parameters()]
    plan = replearn.plan(model, first=2, operator=operators.WholeBlock(correction=correction, rank=2))
    replearn.replace_(model, plan)
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []
    shake_(model, 0.1)
    plain = replearn.deploy(model, example=x)
    expected = outputs(plain, x)
    for parameter in model[1].parameters():
        parameter.data += 1
        assert not torch.equal(outputs(model, x)[0], expected[0])  # each of them counts
        parameter.data -= 1


def test_a_whole_block_whose_neighbour_lacks_a_layer_takes_it_from_the_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Branched(False), *(Branched(True) for _ in range(3))).eval()
    shake_(model, 0.1)
    plan = replearn.plan(model, first=2)
    assert any("branch.weight comes from the next source alone" in note for note in plan.targets[0].notes)
    replearn.replace_(model, plan)
    assert torch.equal(model[1].run.block.branch.running_mean, model[2].branch.running_mean)
    replearn.deploy(model, example=torch.randn(2, 3, 4, 4))


# What does not suit


def test_every_operator_and_every_family_is_in_the_zoo() -> None:
    from replearn.blocks.families import families

    assert {options.name for _, options in builds()} == set(operators.available())
    missing = set(families()) - {entry.family for entry in ZOO.values()} - {"declared"}
    assert missing == set()
