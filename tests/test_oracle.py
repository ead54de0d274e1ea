"""Every operator, with every legal combination of its options, against the oracle: to 1e-10 in float64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import oracle
import pytest
import torch
from oracle_subjects import DIM, HEADS, STOCK_LLAMA, SUBJECTS, Subject, randomised
from torch import Tensor, nn
from torch.autograd import grad

import replearn
from replearn import operators

OPERATORS = operators.available()
WALKED: dict[str, tuple[Any, ...]] = {
    "sources": ("both", "previous", "next", "none"),
    "stop_gradient": (True, False),
    "coefficients": ("separate", "shared"),
    "correction": ("none", "low-rank", "full"),
    "attention": ("projection", "head_wise"),
}
STARTS = ("mean", "previous", "next", "zero", 0.7)
READ_MORE_THAN_A_WEIGHT = ("head_wise", "mlp", "attention_mlp", "whole_block")  # so they need a source


# --- which combinations there are ---------------------------------------------------------------------


def walked_fields(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(OPERATORS[name]) if field.name in WALKED]


def combinations(name: str) -> Iterator[dict[str, Any]]:
    fields = walked_fields(name)
    for values in itertools.product(*(WALKED[field] for field in fields)):
        yield dict(zip(fields, values, strict=True))


def is_legal(name: str, choice: dict[str, Any]) -> bool:
    if choice.get("sources") != "none":
        return True
    return choice["correction"] != "none" and name not in READ_MORE_THAN_A_WEIGHT


def is_extreme(choice: dict[str, Any]) -> bool:
    """All options are at their defaults, or none is."""
    return len({value == WALKED[field][0] for field, value in choice.items()}) < 2


def can_read(subject: Subject, name: str, choice: dict[str, Any]) -> bool:
    """A bottleneck after a transition has a wider conv1, so the previous block alone does not do."""
    reads_conv1 = name in ("bottleneck", "reduced_bottleneck", "whole_block")
    return not ("after a transition" in subject.name and reads_conv1 and choice.get("sources") == "previous")


def cases() -> Iterator[Any]:
    for name, options in OPERATORS.items():
        for subject in SUBJECTS:
            if subject.block.kind not in options.kinds:
                continue
            for choice in combinations(name):
                wanted = name in subject.thorough or is_extreme(choice)
                if wanted and is_legal(name, choice) and can_read(subject, name, choice):
                    label = "-".join(str(value) for value in choice.values())
                    yield pytest.param(subject, name, choice, id=f"{name}-{subject.name}-{label}")


CASES = list(cases())


def one_subject(name: str) -> Subject:
    """The first subject that suits an operator."""
    return next(subject for subject in SUBJECTS if subject.block.kind in OPERATORS[name].kinds)


def options_of(name: str, choice: dict[str, Any], **more: Any) -> Any:
    return OPERATORS[name](**choice, **({"rank": 2} if "correction" in choice else {}), **more)


# --- the operator beside its oracle -------------------------------------------------------------------


class Pair:
    """A real model with one block replaced, and the oracle with copies of the very same tensors."""

    def __init__(self, subject: Subject, name: str, choice: Any, fresh: bool = False, **more: Any) -> None:
        self.subject, self.name, self.choice = subject, name, choice
        self.model = subject.model()
        block = self.model.get_submodule(subject.target)
        self.removed = {name: p.detach() for name, p in block.named_parameters()}  # replace_ looks for who holds p
        plan = replearn.plan(self.model, targets=[subject.target], operator=options_of(name, choice, **more))
        assert (plan.targets[0].previous, plan.targets[0].next) == subject.neighbours
        self.planned = plan.targets[0].parameters_after
        replearn.replace_(self.model, plan)
        self.operator = self.model.get_submodule(subject.target)
        if not fresh:
            randomised(self.operator, seed=2)
        self.previous, self.next = (self.model.get_submodule(neighbour) for neighbour in subject.neighbours)

    def leaves(self) -> dict[str, Tensor]:
        """Everything a gradient could reach, by name."""
        found = {f"operator {name}": p for name, p in self.operator.named_parameters()}
        found |= {f"previous {name}": p for name, p in self.previous.named_parameters()}
        return found | {f"next {name}": p for name, p in self.next.named_parameters()}

    def given(self, leaves: dict[str, Tensor], training: bool) -> oracle.Given:
        """The oracle's view of these leaves."""

        def of(owner: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{owner} "): t for key, t in leaves.items() if key.startswith(f"{owner} ")}

        def side(owner: str) -> dict[str, Tensor]:
            own = self.removed
            fitting = {name: t for name, t in of(owner).items() if name in own and own[name].shape == t.shape}
            return fitting | self.subject.by_role(fitting)

        running = {
            name.removeprefix("run.block."): oracle.Statistics(norm.running_mean.clone(), norm.running_var.clone())
            for name, norm in self.operator.named_modules()
            if isinstance(norm, nn.BatchNorm2d)
        }
        return oracle.Given(
            block=self.subject.block,
            shapes={name: t.shape for name, t in {**self.removed, **self.subject.by_role(self.removed)}.items()},
            previous=side("previous"),
            next=side("next"),
            learned={oracle_name(name): tensor for name, tensor in of("operator").items()},
            running=running,
            training=training,
            **self.gains(),
            names=tuple(self.removed),
            roles=self.subject.by_role,
            **{field: value for field, value in self.choice.items() if field != "correction"},
        )

    def gains(self) -> dict[str, Tensor]:
        """The fixed factors of the forms that have one."""
        places = {"head_wise": {"gain": "bias_gain"}, "mlp": {"gain": "mlp_gain"}}
        places["attention_mlp"] = {"attention.gain": "bias_gain", "mlp.gain": "mlp_gain"}
        buffers = dict(self.operator.named_buffers())
        return {place: buffers[name] for name, place in places.get(self.name, {}).items() if name in buffers}

    def run(self, x: Tensor) -> Tensor:
        own_arguments = self.subject.call if self.name == "whole_block" else {}
        found: Tensor = self.operator(x, **own_arguments)
        return found

    def compute(self, given: oracle.Given, x: Tensor) -> Tensor:
        return getattr(oracle, self.name)(x, given)

    def statistics(self) -> list[Tensor]:
        return [b for name, b in self.operator.named_buffers() if name.endswith(("running_mean", "running_var"))]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def oracle_name(name: str) -> str:
    """`attention.corrections.proj.delta` is `proj.delta` in the oracle; the rest is called the same."""
    for prefix in ("attention.", "mlp.", "corrections."):
        name = name.removeprefix(prefix)
    return name.replace("/", ".")


def assert_near(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    assert found.dtype == expected.dtype == torch.float64, what
    assert found.shape == expected.shape, what
    found, expected = found.detach(), expected.detach()
    difference = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert difference <= tolerance, f"{what}: off by {difference:.1e}"


def agree(pair: Pair, training: bool, tolerance: float = 1e-10) -> None:
    """Output, statistics, and the gradients of the input, of what is learned and of the neighbours."""
    pair.operator.train(training)
    leaves = pair.leaves()
    copies = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    x = pair.subject.example().requires_grad_()
    same = x.detach().clone().requires_grad_()
    given = pair.given(copies, training)
    expected = pair.compute(given, same)
    found = pair.run(x)
    assert_near(found, expected, "output", tolerance)
    if training:
        after = [t for running in given.running.values() for t in (running.mean, running.var)]
        for number, (one, other) in enumerate(zip(pair.statistics(), after, strict=True)):
            assert_near(one, other, f"running statistics {number}", tolerance)

    upstream = noise(*found.shape)
    ours = grad(found, [x, *leaves.values()], upstream, allow_unused=True)
    theirs = grad(expected, [same, *copies.values()], upstream, allow_unused=True)
    for name, one, other in zip(["input", *leaves], ours, theirs, strict=True):
        assert (one is None) == (other is None), f"{name}: has a gradient in one and none in the other"
        if one is not None:
            assert_near(one, other, f"gradient of {name}", tolerance)
        if name.startswith("operator") or name == "input":
            assert one is not None, f"{name} takes no part in the output"
        elif pair.choice.get("stop_gradient", True):
            assert one is None, f"a gradient reaches {name} through stop-gradient"


# --- the contract of the folder -----------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_an_oracle_and_is_tried_with_every_combination_of_options(name):
    assert callable(getattr(oracle, name, None)), f"write tests/oracle.py's {name}(x, given) from its equations"
    tried = [case.values[2] for case in CASES if case.values[1] == name]
    for choice in combinations(name):
        assert choice in tried or not is_legal(name, choice), f"no subject is thorough about {name}: {choice}"


@pytest.mark.parametrize("name", OPERATORS)
def test_every_option_of_every_operator_is_walked(name):
    hints = get_type_hints(OPERATORS[name], localns={"Kind": str})  # a name that only type checkers see
    for field in dataclasses.fields(OPERATORS[name]):
        if field.name in WALKED:
            allowed = (True, False) if hints[field.name] is bool else get_args(hints[field.name])
            assert set(allowed) == set(WALKED[field.name]), f"{name}.{field.name} has choices that are not tested"
        else:
            assert field.name in ("rank", "start"), f"{name}.{field.name} is not held to the oracle"


def test_the_oracle_shares_nothing_with_the_package():
    with open(oracle.__file__) as source:
        imports = [line for line in source if line.startswith(("import ", "from "))]
    assert imports
    assert not [line for line in imports if "replearn" in line]


# --- agreement ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("subject", "name", "choice"), CASES)
def test_output_and_gradients_are_the_oracles(subject, name, choice):
    pair = Pair(subject, name, choice)
    agree(pair, training=False)
    deployed_as_computed(pair)
    if list(pair.statistics()):  # nothing else here differs between the modes
        agree(pair, training=True)


@torch.no_grad()
def deployed_as_computed(pair: Pair) -> None:
    """`fuse()` in eval mode is the operator, to 1e-12, and holds no operator."""
    x = pair.subject.example()
    expected = pair.run(x)
    fused = pair.operator.fuse()
    own_arguments = pair.subject.call if pair.name == "whole_block" else {}
    assert_near(fused(x, **own_arguments), expected, "deployed output", tolerance=1e-12)
    assert not [m for m in fused.modules() if type(m).__module__.startswith("replearn.operators")]


@pytest.mark.parametrize("name", ["head_wise", "mlp", "attention_mlp"])
def test_llamas_own_norm_is_run_as_it_is_in_float32(name):
    # LlamaRMSNorm computes in float32 inside a float64 model; the borrowed norm must do as the neighbour does
    agree(Pair(STOCK_LLAMA, name, {"stop_gradient": False}), training=True, tolerance=1e-5)


# --- starting values ----------------------------------------------------------------------------------


def start_cases() -> Iterator[Any]:
    for name in OPERATORS:
        if "start" not in [field.name for field in dataclasses.fields(OPERATORS[name])]:
            continue
        for choice in combinations(name):
            if not choice["stop_gradient"] or choice["correction"] != "none" or choice["sources"] == "none":
                continue
            for start in STARTS:
                yield pytest.param(name, choice, start, id=f"{name}-{'-'.join(map(str, choice.values()))}-{start}")


def start_is_legal(choice: dict[str, Any], start: str | float) -> bool:
    if start not in ("previous", "next"):
        return True
    return choice["sources"] in ("both", start) and choice["coefficients"] == "separate"


def reproducing(pair: Pair, given: oracle.Given) -> dict[str, Tensor]:
    """By side, the coefficients that give this source alone."""
    form = given.attention if pair.name == "attention_mlp" else pair.name
    previous, following, scale = {
        "basic": ("conv2", "conv1", oracle.row_lengths),
        "bottleneck": ("conv2", "conv2", oracle.row_lengths),
        "projection": ("proj", "proj", lambda weight: noise(1) * 0 + 1),
        "head_wise": ("proj", "proj", lambda weight: oracle.head_scales(weight, HEADS)),
        "whole_block": (given.names[0], given.names[0], lambda weight: noise(len(given.names)) * 0 + 1),
    }[form]
    return {side: scale(weight) for side, weight in given.read(previous, following).items()}


@pytest.mark.parametrize(("name", "choice", "start"), list(start_cases()))
def test_coefficients_start_as_asked(name, choice, start):
    subject = one_subject(name)
    if not start_is_legal(choice, start):
        with pytest.raises(replearn.ReplearnError, match="start="):
            options_of(name, choice, start=start)
        return
    pair = Pair(subject, name, choice, fresh=True, start=start)
    given = pair.given(pair.leaves(), training=False)
    expected = oracle.starting(reproducing(pair, given), start, choice["coefficients"])
    learned = {letter: given.learned[letter] for letter in ("a", "b") if letter in given.learned}
    assert learned.keys() == expected.keys()
    for letter, value in expected.items():
        assert_near(learned[letter], value, letter, tolerance=1e-12)


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.block.kind != "any"], ids=lambda s: s.name)
def test_a_whole_block_starts_as_a_block_of_mean_parameters_and_statistics(subject):
    pair = Pair(subject, "whole_block", {}, fresh=True)
    given = pair.given(pair.leaves(), training=False)
    means = {}
    for parameter in given.names:
        found = [side[parameter] for side in (given.previous, given.next) if parameter in side]
        means[parameter] = sum(found) / len(found)
    for path in given.running:
        sides = [side.get_submodule(path) for side in (pair.previous, pair.next)]
        mean, var = (sum(getattr(norm, kind) for norm in sides) / 2 for kind in ("running_mean", "running_var"))
        given.running[path] = oracle.Statistics(mean, var)
    x = subject.example()
    expected = oracle.BLOCKS[subject.block.kind](x, subject.by_role(means), given)
    pair.operator.eval()
    assert_near(pair.run(x), expected, "output at the start")


@pytest.mark.parametrize("name", [name for name in OPERATORS if "correction" in walked_fields(name)])
@pytest.mark.parametrize("correction", ["low-rank", "full"])
def test_a_correction_starts_at_zero_and_can_learn(name, correction):
    subject = one_subject(name)
    plain = Pair(subject, name, {}, fresh=True)
    pair = Pair(subject, name, {"correction": correction}, fresh=True)
    x = subject.example()
    y = pair.operator.eval()(x)
    assert_near(y, plain.operator.eval()(x), "output at the start", tolerance=1e-14)
    corrections = {n: p for n, p in pair.operator.named_parameters() if "corrections." in n}
    assert corrections
    loss = (y * noise(*y.shape)).sum()
    for key, slope in zip(corrections, grad(loss, list(corrections.values())), strict=True):
        assert bool(slope.abs().sum() > 0) != key.endswith(".right"), key  # right moves once left has


@pytest.mark.parametrize("name", ["basic", "bottleneck", "reduced_bottleneck"])
def test_the_operators_own_norm_starts_fresh(name):
    norm = Pair(one_subject(name), name, {}, fresh=True).operator.norm
    for found, expected in ((norm.weight, 1), (norm.bias, 0), (norm.running_mean, 0), (norm.running_var, 1)):
        assert torch.equal(found.detach(), torch.full_like(found, expected))


# --- how much is learned ------------------------------------------------------------------------------

C, B = 8, 4  # of the bottleneck subject
LEARNED = {  # SPEC.md, section 2
    ("basic", "cifar"): 4 * 4,
    ("bottleneck", "torchvision bottleneck"): 2 * B + 2 * C,
    ("bottleneck", "grouped bottleneck"): 2 * 2 * B + 2 * C,
    ("reduced_bottleneck", "torchvision bottleneck"): 2 * C,
    ("projection", "timm ViT"): 2,
    ("head_wise", "timm ViT"): 2 * HEADS,
    ("mlp", "timm ViT"): 0,
    ("attention_mlp", "timm ViT"): 2,
    ("no_weights", "cifar"): 2 * 4,
    ("no_weights", "torchvision bottleneck"): 2 * C,
    ("no_weights", "timm ViT"): 2 * DIM,
    ("whole_block", "cifar"): 2 * 6,  # two convolutions, two norms
    ("removal", "cifar"): 0,
}


def num_learned(name: str, subject_name: str, **choice: Any) -> int:
    subject = next(subject for subject in SUBJECTS if subject.name == subject_name)
    pair = Pair(subject, name, choice)
    count = sum(p.numel() for p in pair.operator.parameters() if p.requires_grad)
    assert count == pair.planned, "the plan promised another number"
    return count


def test_as_many_parameters_are_learned_as_the_specification_says():
    assert {operator for operator, _ in LEARNED} == set(OPERATORS)
    assert {case: num_learned(*case) for case in LEARNED} == LEARNED


def test_options_change_the_number_of_learnable_parameters_as_they_must():
    assert num_learned("projection", "timm ViT", coefficients="shared") == 1
    assert num_learned("head_wise", "timm ViT", coefficients="shared") == HEADS
    assert num_learned("attention_mlp", "timm ViT", attention="head_wise") == 2 * HEADS
    assert num_learned("basic", "cifar", sources="previous") == 3 * 4
    assert num_learned("projection", "timm ViT", sources="next") == 1
    assert num_learned("projection", "timm ViT", correction="full") == 2 + DIM * DIM + DIM
    assert num_learned("projection", "timm ViT", correction="low-rank") == 2 + 2 * 2 * DIM + DIM
    assert num_learned("basic", "cifar", correction="low-rank") == 4 * 4 + 2 * (4 + 4 * 9)
