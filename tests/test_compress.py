"""compress: a budget in, a smaller model out, the given one untouched; on a small network trained for seconds."""

from __future__ import annotations

import copy
import math
import threading
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import replearn
from replearn.compression import compress, recognise
from replearn.compression.batches import read
from replearn.compression.block_costs import BlockCosts
from replearn.compression.choose import SCORING_SAMPLES, Chooser
from replearn.compression.forms import correction, image_map, merge_corrections_, token_map
from replearn.compression.heal import before_realignment, best_rate
from replearn.compression.measure import agreement
from replearn.models import TransformerLM


class Residual(nn.Module):
    """A block as strangers write them: functional ReLU, a sum in place, names of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.na(self.a(x)))
        y = self.nb(self.b(y))
        y += x
        return F.relu(y)


class Net(nn.Module):
    def __init__(self, depth: int = 6, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(F.relu(self.stem(x))).mean((2, 3)))
        return out


@cache
def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)


@cache
def trained() -> Net:
    """About 98 % on the digits that it did not see."""
    torch.manual_seed(0)
    net, (x, y) = Net(), digits()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(200):
        at = torch.randint(0, 1200, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(net(x[at]), y[at]).backward()
        optimizer.step()
    return net.eval()


def accuracy(model: nn.Module) -> float:
    x, y = digits()
    with torch.no_grad():
        return float((model(x[1200:]).argmax(1) == y[1200:]).float().mean())


def loader(samples: int = 200, size: int = 50) -> list[tuple[Tensor, Tensor]]:
    x, y = digits()
    return list(zip(x[:samples].split(size), y[:samples].split(size), strict=True))


EVERY_SECOND = ["body.1", "body.3"]


def test_recognises_blocks_by_what_they_compute() -> None:
    found = recognise(trained(), loader())
    assert [block.structure.kind for block in found.blocks] == ["basic"] * 6
    assert found.candidates == tuple(f"body.{i}" for i in range(6))
    assert "6 of 6 blocks can go" in str(found)


@pytest.mark.parametrize("form", ["removal", "low-rank", "full"])
def test_keeps_most_of_a_trained_network(form: Any) -> None:
    model = trained()
    before = copy.deepcopy(model.state_dict())
    small = compress(model, loader(), budget=EVERY_SECOND, form=form)
    assert small.removed == tuple(EVERY_SECOND)
    assert accuracy(small.model) > accuracy(model) - 0.05
    assert small.agreement.divergence < small.removal.divergence / 3
    assert small.after.parameters < small.before.parameters
    assert small.promised.parameters == small.after.parameters or form == "low-rank"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "2 of 6 blocks out" in str(small)


def test_removal_adds_nothing_and_full_corrections_become_standard_layers() -> None:
    removal = compress(trained(), loader(), budget=EVERY_SECOND, form="removal").model
    assert type(removal.get_submodule("body.1")) is nn.Identity
    full = compress(trained(), loader(), budget=EVERY_SECOND, form="full").model
    assert not [m for m in full.modules() if type(m).__module__.startswith("replearn")]


@pytest.mark.parametrize(
    ("branch", "shape"), [(image_map(5, 3, None), (2, 5, 6, 6)), (token_map(5, None), (2, 5))]
)
def test_a_correction_and_its_standard_layers_compute_the_same(branch: nn.Module, shape: tuple[int, ...]) -> None:
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    model = nn.Sequential(correction(branch, nn.ReLU())).eval()
    x = torch.randn(shape)
    expected = model(x)
    torch.testing.assert_close(merge_corrections_(model)(x), expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, torch.fx.GraphModule) for module in model.modules())


def test_realignment_is_what_repairs_removal() -> None:
    bare = compress(trained(), loader(), budget=EVERY_SECOND, form="removal", realign=False)
    again = compress(trained(), loader(), budget=EVERY_SECOND, form="removal")
    assert again.agreement.divergence < bare.agreement.divergence
    assert all(layer.after <= layer.before for layer in again.fitted.layers)


def test_rows_keep_their_norms() -> None:
    small = compress(trained(), loader(), budget=EVERY_SECOND, form="removal").model
    for name in ("body.2.a", "body.4.b"):
        was, now = (
            m.get_submodule(name).get_parameter("weight").flatten(1).norm(dim=1) for m in (trained(), small)
        )
        torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("budget", "quantity", "share"),
    [("parameters<=70%", "parameters", 0.7), ("flops<=75%", "flops", 0.75)],
)
def test_meets_a_budget(budget: str, quantity: str, share: float) -> None:
    small = compress(trained(), loader(), budget=budget)
    assert small.after.of(quantity) <= share * small.before.of(quantity)
    assert accuracy(small.model) > accuracy(trained()) - 0.06
    assert small.choice is not None
    assert small.removed


def test_takes_adjacent_blocks_and_one_map_stands_for_them() -> None:
    small = compress(trained(), loader(), budget=["body.2", "body.3"])
    assert type(small.model.get_submodule("body.2")) is nn.Identity
    assert type(small.model.get_submodule("body.3")) is not nn.Identity


def test_a_number_of_blocks_is_chosen_by_the_least_damage() -> None:
    small = compress(trained(), loader(), budget="blocks=2", form="removal")
    worst = compress(trained(), loader(), budget=EVERY_SECOND, form="removal")
    assert len(small.removed) == 2
    assert small.agreement.divergence <= worst.agreement.divergence * 1.5


def test_few_decisions_are_judged_by_the_error_of_their_logits() -> None:
    aim = torch.tensor([[2.0, 0.0, 1.0]])
    assert agreement([aim], [aim + 5]).error == pytest.approx(0, abs=1e-10)  # the same decision, as surely
    assert agreement([aim], [torch.tensor([[2.0, 0.0, 4.0]])]).error == pytest.approx(3.0)
    few = chooser_of(trained(), [x for x, _ in loader(700, 100)])
    assert few.few_decisions
    assert sum(batch.size for batch in few.data.held_out()) == SCORING_SAMPLES
    torch.manual_seed(0)
    tokens = TransformerLM(11, dim=8, depth=3, num_heads=2, hidden=8, max_length=32).eval()
    many = chooser_of(tokens, [torch.randint(11, (24, 32)) for _ in range(10)])
    assert not many.few_decisions


def chooser_of(model: nn.Module, batches: list[Tensor]) -> Chooser:
    found, data = recognise(model, batches), read(batches)
    return Chooser(model, found, data, BlockCosts(model, found, data, 8), "blocks")


def test_the_users_metric_decides() -> None:
    seen: list[int] = []

    def metric(model: nn.Module) -> float:
        seen.append(1)
        return accuracy(model)

    small = compress(trained(), loader(), budget="blocks=1", metric=metric)
    assert small.metric == (accuracy(trained()), accuracy(small.model))
    assert len(seen) > 6


@pytest.mark.parametrize("augment", [None, "images"])
def test_healing_brings_the_model_closer_and_never_away(augment: Any) -> None:
    small = compress(trained(), loader(), budget=["body.0", "body.1", "body.3"], form="removal", realign=False,
                     heal=40, augment=augment)  # fmt: skip
    assert small.healing is not None
    assert small.healing.after < (0.3 if augment is None else 0.7) * small.healing.before
    assert small.agreement.divergence < small.removal.divergence
    assert small.agreement.same >= small.removal.same
    assert not small.model.training
    assert "healed for" in str(small)


def test_healing_with_batchnorm_starts_from_the_weights_that_the_blocks_were_trained_with() -> None:
    teacher, names = trained(), ["body.0", "body.3"]
    small = compress(teacher, loader(), budget=names, form="full").model
    start, own, before = before_realignment(small, teacher, names), small.state_dict(), teacher.state_dict()
    assert any(not torch.equal(own[key], before[key]) for key in own if not key.startswith(("body.0.", "body.3.")))
    for key, value in start.items():
        assert torch.equal(value, (own if key.startswith(("body.0.", "body.3.")) else before)[key]), key


def test_the_rate_of_healing_is_the_best_of_three_trials() -> None:
    losses = {1.0: 0.5, 1 / 3: 0.4, 0.1: 0.6, 3.0: 0.2}
    assert best_rate(losses.__getitem__, 1.0, losses[1.0]) == 1 / 3
    assert best_rate({**losses, 1 / 3: 0.6}.__getitem__, 1.0, losses[1.0]) == 3.0
    assert best_rate(lambda rate: math.inf, 1.0, 0.5) == 1.0


def test_healing_keeps_a_model_that_it_can_not_better() -> None:
    """Noise for images: whatever training does, the start or something better is handed out."""
    start = compress(trained(), loader(), budget=["body.5"])
    small = compress(trained(), loader(), budget=["body.5"], heal=2, augment=torch.zeros_like)
    assert small.healing is not None
    assert small.healing.after <= small.healing.before
    assert small.agreement.same >= start.agreement.same - 0.05


@pytest.mark.parametrize("kind", ["tensors", "pairs", "dicts", "forward", "one tensor", "iterator"])
def test_loaders_of_every_kind_do_the_same(kind: str) -> None:
    pairs = loader()
    given: Any = {
        "tensors": [x for x, _ in pairs],
        "pairs": pairs,
        "dicts": [{"x": x, "labels": y} for x, y in pairs],
        "forward": [{"image": x} for x, _ in pairs],
        "one tensor": torch.cat([x for x, _ in pairs]),
        "iterator": iter(pairs),
    }[kind]
    forward = (lambda model, batch: model(batch["image"])) if kind == "forward" else None
    small = compress(trained(), given, budget=EVERY_SECOND, form="removal", forward=forward)
    assert small.num_samples == 200
    assert accuracy(small.model) > accuracy(trained()) - 0.06


def test_a_plan_is_taken_as_it_is() -> None:
    plan = replearn.plan(trained(), targets=EVERY_SECOND, operator=replearn.operators.Removal())
    small = compress(trained(), loader(), budget=plan)
    assert [fit.form for fit in small.fitted.blocks] == ["removal", "removal"]


def test_a_model_in_train_mode_is_read_in_eval_mode_and_left_as_it_was() -> None:
    model = copy.deepcopy(trained()).train()
    small = compress(model, loader(), budget=EVERY_SECOND)
    assert model.training
    assert model.body[0].na.training
    assert not small.model.training
    assert "train mode" in str(small)


@pytest.mark.parametrize("form", ["full", "low-rank"])
def test_no_random_number_is_taken_and_the_same_comes_out(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    state = torch.get_rng_state()
    with monkeypatch.context() as alone:  # test runners have threads, and then random numbers go on
        alone.setattr(threading, "active_count", lambda: 1)
        compress(model, loader(), budget=["body.1"], form=form, augment="images")
    assert torch.equal(torch.get_rng_state(), state)
    one = compress(model, loader(), budget=["body.1"], form=form)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    other = compress(model, loader(), budget=["body.1"], form=form)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_model_made_in_inference_mode_is_compressed() -> None:
    with torch.inference_mode():
        model = copy.deepcopy(trained())
    small = compress(model, loader(), budget=["body.1"])
    assert small.model(loader()[0][0]).shape == (50, 10)


def test_a_model_that_the_metric_has_no_number_for_is_the_worst() -> None:
    untouched = trained()
    broken_by_removal = iter([1.0, *[math.nan, 0.5, 0.4] * 40])
    small = compress(untouched, loader(), budget="blocks=1", metric=lambda model: next(broken_by_removal))
    assert small.choice is not None
    assert all(math.isfinite(step.damage) for step in small.choice.steps)


def test_a_metric_that_sets_modes_changes_neither_model() -> None:
    model = trained()
    small = compress(
        model, loader(), budget="blocks=1", metric=lambda net: float(net.train()(loader()[0][0]).mean())
    )
    assert not any(module.training for net in (model, small.model) for module in net.modules())
    assert small.agreement.divergence < small.removal.divergence


def autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = model(batch[0]).float()
    return out


def test_under_autocast_the_model_keeps_its_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        small = compress(trained(), loader(), budget=EVERY_SECOND, form="full")
    assert {p.dtype for p in small.model.parameters()} == {torch.float32}
    assert accuracy(small.model) > accuracy(trained()) - 0.05


class Shares(nn.Module):
    """Blocks with a weight in common, and one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.steps = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(6))
        for step in (self.steps[3], self.steps[4]):
            step.linear1.weight = self.steps[2].linear1.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))[:, None]
        for step in (*self.steps, self.steps[1]):
            x = step(x)
        return self.head(x[:, 0])


def test_shared_weights_stay_and_blocks_that_run_twice_are_left_out() -> None:
    model = Shares().eval()
    assert recognise(model, loader()).candidates == tuple(f"steps.{i}" for i in (0, 2, 3, 4, 5))
    small = compress(model, loader(), budget=["steps.0", "steps.3"])
    assert torch.equal(small.model.steps[2].linear1.weight, model.steps[2].linear1.weight)
    assert small.model.steps[4].linear1.weight is small.model.steps[2].linear1.weight
    removed = compress(model, loader(), budget=["steps.3"], form="removal")
    assert removed.promised.parameters == removed.after.parameters


class Wrapped(Residual):
    def forward(self, x: Tensor) -> Any:
        return {"x": super().forward(x)}


class Unwraps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Wrapped(12) for _ in range(3))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.body:
            x = block(x)["x"]
        return self.head(x.mean((2, 3)))


def no_blocks() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def broken() -> Net:
    model = copy.deepcopy(trained())
    with torch.no_grad():
        model.body[2].a.weight.fill_(float("nan"))
    return model


@pytest.mark.parametrize(
    ("model", "data", "settings", "says"),
    [
        (no_blocks, loader, {"budget": "blocks=1"}, "has no stack of blocks"),
        (trained, list, {"budget": "blocks=1"}, "loader is empty"),
        (trained, lambda: loader(1, 1), {"budget": "blocks=1"}, "single sample"),
        (trained, lambda: [torch.full((4, 1, 8, 8), float("nan"))], {"budget": "blocks=1"}, "NaN"),
        (broken, loader, {"budget": "blocks=1"}, "NaN or infinity"),
        (trained, loader, {"budget": "parameters<=1%"}, r"can't meet parameters<=1%.*Ask for parameters<="),
        (trained, loader, {"budget": "blocks=9"}, "ask for blocks=6 or fewer"),
        (trained, loader, {"budget": "speed<=3"}, "can't be read: write 'latency<=75%'"),
        (trained, loader, {"budget": ["body.9"]}, "'body.9' is no block of Net"),
        (trained, loader, {"budget": 3}, "can't be read"),
        (trained, loader, {"budget": "blocks=1", "forward": autocast}, "of one dtype, and no autocast"),
        (trained, loader, {"budget": "memory<=1GiB"}, "can't be read: write 'latency<=75%', 'parameters"),
        (Unwraps, loader, {"budget": "blocks=1"}, r"None of the 3 blocks of Unwraps.*\(12, 8, 8\) into no tensor"),
        (lambda: Net().to("meta"), loader, {"budget": "blocks=1"}, "on the meta device"),
        (trained, loader, {"budget": "blocks=1", "form": "big"}, "form='big'"),
        (trained, loader, {"budget": "blocks=1", "heal": "long"}, "heal='long'"),
        (trained, loader, {"budget": "blocks=1", "rank": 0}, "rank=0: write a whole number of at least 1"),
        (trained, loader, {"budget": "blocks=1", "samples": 0}, "samples=0: write a whole number of at least 2"),
        (trained, loader, {"budget": "blocks=1", "metric": lambda model: "good"}, "returned .good.: return one"),
        (trained, loader, {"budget": "blocks=1", "metric": lambda model: math.nan}, "is nan for the untouched"),
        (trained, lambda: [torch.zeros(4, 3, 8, 8)], {"budget": "blocks=1"}, "could not be run on a batch"),
        (trained, lambda: [{"x": [0.5, 1.0]}], {"budget": "blocks=1"}, "Batch 0 of the loader, a dict, holds no"),
    ],
)
def test_errors_teach(model: Any, data: Any, settings: dict[str, Any], says: str) -> None:
    made = model()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(replearn.ReplearnError, match=says):
        compress(made, data(), **settings)
    if next(made.parameters()).is_meta:
        return
    for name, value in made.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.modules())


def test_a_model_of_single_numbers_takes_no_decisions() -> None:
    model = copy.deepcopy(trained())
    model.head = nn.Linear(12, 1)
    small = compress(model, loader(), budget=EVERY_SECOND)
    assert math.isnan(small.agreement.same)
    assert f"samples: relative squared error {small.agreement.divergence:.4f} (" in str(small)


def test_blocks_names_in_one_text_are_a_list_of_them() -> None:
    from replearn.compression.choose import read_budget

    assert read_budget("layer1.1, layer2.1") == read_budget(["layer1.1", "layer2.1"])
    assert read_budget("latency<=7.5%").quantity == "latency"
