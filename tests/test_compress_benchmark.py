"""The benchmark of compress and its peers: what each method makes, what is skipped, what the tables say."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import text_root  # noqa: F401
from torch import Tensor, nn

import replearn
from replearn.experiments.training.recipe import Text
from replearn.models import CifarResNet, TransformerLM

FOLDER = Path(__file__).parent.parent / "benchmarks" / "compress"
if not FOLDER.exists():
    pytest.skip("the benchmarks are not part of an installed package", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import networks  # noqa: E402
from measuring import Measuring  # noqa: E402
from methods import all_methods, fewer_out  # noqa: E402
from networks import TRAINED, Training  # noqa: E402
from practise import classifier, feature_error, practise  # noqa: E402
from practise_choice import put_adaptors, scores_of  # noqa: E402
from results import Results  # noqa: E402
from run import main  # noqa: E402
from subjects import Subject, crop_and_flip, every_second  # noqa: E402
from table import page  # noqa: E402
from training_free import own_span, reestimate_, removal, replace_me  # noqa: E402

ABOUT = {"test_images": None, "device": "cpu", "command": "python run.py", "commit": "abc"}


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def words(count: int, seed: int) -> Tensor:
    return torch.randint(30, (count, 8), generator=torch.Generator().manual_seed(seed))


def agreement(teacher: nn.Module, x: Tensor) -> Any:
    @torch.no_grad()
    def score(model: nn.Module) -> float:
        return 100 * float((model(x).argmax(-1) == teacher(x).argmax(-1)).float().mean())

    return score


def convolutional() -> Subject:
    torch.manual_seed(0)
    model = CifarResNet(26, width=4)
    reestimate_(model.train(), images(64, 9))
    model.eval()
    return Subject(
        "net", model, every_second(model), images, agreement(model, images(50, 7)), augment=crop_and_flip
    )


def transformer() -> Subject:
    torch.manual_seed(0)
    model = TransformerLM(30, dim=16, depth=6, num_heads=2, hidden=32, max_length=8).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2)  # blocks that do something
    return Subject("text", model, every_second(model), words, agreement(model, words(50, 7)))


def test_every_second_inner_block_goes() -> None:
    assert every_second(CifarResNet(32))[:3] == ("layer1.1", "layer1.3", "layer2.1")
    assert len(every_second(CifarResNet(56))) == 12
    assert every_second(TransformerLM(30, dim=16, depth=12, num_heads=2, hidden=32), 4) == (
        "blocks.1", "blocks.5", "blocks.9",
    )  # fmt: skip


def test_practise_chooses_blocks_by_what_adaptors_can_not_mend() -> None:
    subject = convolutional()
    stages = [list(stack.blocks) for stack in replearn.find_stacks(subject.model)]
    student = removal(subject.taking_out([stages[0][2]]))
    x = images(4, 1)
    before = student(x)
    adaptors = list(put_adaptors(student, stages, stages[0][2]))
    assert len(adaptors) == 5  # behind layer1.0 and 1.1; before 1.3, and layer2.0's convolution and shortcut
    torch.testing.assert_close(student(x), before)
    with torch.no_grad():
        subject.model.get_submodule(stages[0][1]).bn2.weight.zero_()  # does nothing: easiest to do without
        subject.model.get_submodule(stages[0][1]).bn2.bias.zero_()
    scores = scores_of(subject, images(32, 2), 3)
    assert min(scores, key=scores.__getitem__) == stages[0][1]
    assert list(scores) == [name for stage in stages for name in stage[1:]]


class Follows(nn.Module):
    """Adds a linear map of what another layer made."""

    def __init__(self, source: nn.Module, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        source.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, made: Tensor) -> None:
        self.seen = made.clone()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(self.seen)
        return out


def follows_by_tokens() -> Subject:
    subject = transformer()
    subject.model.blocks[1] = Follows(subject.model.blocks[0].down, nn.Linear(16, 16))
    return subject.taking_out(["blocks.1"])


def follows_by_pixels() -> Subject:
    subject = convolutional()
    before = subject.model.layer2[0]  # its shortcut is a convolution
    before.relu = nn.Identity()
    layers = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    subject.model.layer2[1] = Follows(before.bn2, layers).eval()
    return subject.taking_out(["layer2.1"])


@pytest.mark.parametrize("made", [follows_by_pixels, follows_by_tokens])
def test_replace_me_is_exact_where_a_block_is_a_linear_map_of_the_branch_before(made: Any) -> None:
    subject = made()
    x = subject.draw(64, 0)
    with torch.no_grad():
        small, aim = replace_me(subject, x), subject.model(x)
        torch.testing.assert_close(small(x), aim, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(removal(subject)(x), aim, rtol=1e-1, atol=1e-1)
    shapes = [{name: p.shape for name, p in net.named_parameters()} for net in (removal(subject), small)]
    assert shapes[0] == shapes[1]


def test_the_span_that_replace_me_chooses_is_where_least_changes() -> None:
    subject = transformer()
    for name in ("blocks.3", "blocks.4"):
        block = subject.model.get_submodule(name)
        for layer in (block.down, block.attn.proj):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    assert len(subject.out) == 2
    assert own_span(subject, words(16, 0)).out == ("blocks.3", "blocks.4")


@pytest.mark.parametrize("subject", [convolutional(), transformer()], ids=lambda subject: subject.name)
def test_practise_trains_all_but_the_classifier(subject: Subject) -> None:
    torch.manual_seed(0)
    x = subject.draw(32, 0)
    start, made = removal(subject), practise(subject, x, 0.02 if subject.convolutional else 1e-3, steps=40)
    with torch.no_grad():
        assert feature_error(made, subject, x) < feature_error(start, subject, x)
    before = dict(start.named_parameters())
    still = {name for name, p in made.named_parameters() if torch.equal(p, before[name])}
    assert still - {"norm.weight", "norm.bias"} == classifier(subject)  # the last norm is behind the features
    assert not made.training


@pytest.mark.parametrize("subject", [convolutional(), transformer()], ids=lambda subject: subject.name)
def test_a_measurement_is_one_line_and_is_not_made_again(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    measuring = Measuring(subject, Results(path), ABOUT, steps=3, choice_steps=2)
    measuring.trained()
    chosen = [all_methods()[name] for name in ("removal", "ReplaceMe", "full", "PRACTISE")]
    for method in chosen:
        measuring.measure(method, 40, 0, "3 steps" if method.trains else "none")
    fit = measuring.known(kind="method", method="full", images=40, seed=0, budget="none")["seconds"]
    measuring.measure(all_methods()["full, healed"], 40, 0, f"{fit + 0.5:.3f} s")
    found = path.read_text().splitlines()
    path.write_text("\n".join([*found, '{"cut": off']))
    again = Measuring(subject, Results(path), ABOUT, steps=3, choice_steps=2)
    for method in chosen:
        if not method.trains:
            again.measure(method, 40, 0, "none")
    assert path.read_text().splitlines()[: len(found)] == found
    assert len(path.read_text().splitlines()) == len(found) + 1
    lines = list(Results(path).lines.values())
    measured = [line for line in lines if line["kind"] == "method"]
    assert all(line["parameters"] < line["parameters_before"] for line in measured)
    assert all(line["command"] and line["commit"] == "abc" for line in lines)
    assert "| ours: full, healed |" in page(lines)


DIGITS = Training("demo", "digits", 1, model="cifar_resnet:20:4")
TEXT = Training("tab_wikitext2", "wikitext2", 1, model="lm:16:6:2:32", intervals=(2, 4))


@pytest.mark.parametrize(
    ("training", "methods"),
    [(DIGITS, ["removal", "full"]), (TEXT, ["removal", "ReplaceMe"])],
    ids=["images", "text"],
)
def test_the_script_trains_what_is_missing_and_goes_on_where_it_was(
    training: Training,
    methods: list[str],
    tmp_path: Path,
    text_root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TRAINED, "tiny", training)
    whole = networks.recipe_of
    short = {"batch_size": 64, "text": Text(sequence_length=8, min_count=1)}
    monkeypatch.setattr(networks, "recipe_of", lambda *given: replace(whole(*given), **short))
    path = tmp_path / "results.jsonl"
    given = ["--subjects", "tiny", "--cache", str(tmp_path / "runs"), "--images", "40", "--device", "cpu"]
    given += ["--data-root", str(text_root), "--steps", "2", "--out", str(path), "--methods", *methods]
    main([*given, "--seeds", "0", "--net-seeds", "0"])
    first = path.read_text()
    main([*given, "--seeds", "0", "1", "--net-seeds", "0"])
    assert path.read_text().startswith(first)
    lines = [line for line in Results(path).lines.values() if line["kind"] == "method"]
    assert {line["seed"] for line in lines if line["method"] == "removal"} == {0, 1}
    assert len({line["subject"] for line in lines}) == len(training.intervals)
    assert f"## tiny\n\ncpu, all of the test set; {lines[0]['metric']}" in page(list(Results(path).lines.values()))


def test_fewer_blocks_go_where_nothing_stands_in_their_place() -> None:
    subject = convolutional()
    assert 1 <= len(fewer_out(subject, images(8, 0))) <= len(subject.out)


def test_a_table_says_who_is_ahead() -> None:
    def line(method: str, ours: bool, score: float, seed: int) -> dict[str, Any]:
        return {
            **ABOUT, "kind": "method", "subject": "net", "net_seed": 0, "method": method, "images": 500,
            "seed": seed, "budget": "none", "ours": ours, "trains": False, "metric": "accuracy", "score": score,
            "seconds": 1.0, "latency_ms": 1.0, "latency_before_ms": 2.0, "parameters": 1, "parameters_before": 2,
            "blocks_out": 3, "cpu_seconds": 1.0, "threads": 1,
        }  # fmt: skip

    lines = [line(*row) for row in [("mine", True, 80, 0), ("mine", True, 82, 1), ("peer", False, 85, 0)]]
    text = page([*lines, line("peer", False, 83, 1)])
    assert "| peer | **84.00 ± 1.41 (2)** |" in text
    assert "ours (mine) behind peer by -3.00 ± 2.83 (2), better in 0 of 2." in text
    better = page([{**found, "metric": "perplexity"} for found in [*lines, line("peer", False, 83, 1)]])
    assert "ours (mine) ahead of peer by 3.00" in better
