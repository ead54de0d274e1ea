"""Small samples of what `make torture` tries at full length, and what the core may never do."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import replearn
from replearn import ReplearnError
from torture import crafted, edits, generated, hostile
from torture.ledger import RESULTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_random_models_go_all_the_way_or_are_refused_with_the_block_s_name(start: int) -> None:
    outcomes = [generated.walk(seed, libraries=False)[0] for seed in range(5000 + start, 5010 + start)]
    assert set(outcomes) == {"whole", "refused"}


def test_changed_and_cut_files_are_refused(tmp_path: Path) -> None:
    good = hostile.whole_file(tmp_path).read_bytes()
    cases = [*hostile.changed_bytes(good), *hostile.cut(good)]
    file, model = tmp_path / "hostile.safetensors", hostile.model()
    before = [parameter.clone() for parameter in model.parameters()]
    for what, data in Random(0).sample(cases, 150):
        file.write_bytes(data)
        assert hostile.check(lambda: replearn.load(model, file), what, hostile.peak()) is None
    assert all(map(torch.equal, before, model.parameters()))


def test_a_flipped_bit_in_a_run_s_state_is_found(tmp_path: Path) -> None:
    from replearn.experiments.training.state import read_state

    data = hostile.state_file(tmp_path).read_bytes()
    file = tmp_path / "flipped.safetensors"
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        ReplearnError, match=r"can't be read: .*do not match its checksum.*Delete it to start anew"
    ):
        read_state(file)


def test_crafted_files_are_refused_in_bounded_time_and_run_nothing(tmp_path: Path) -> None:
    good = hostile.whole_file(tmp_path).read_bytes()
    tried = 0
    for kind, what, load in crafted.crafted(tmp_path, good):
        if "wide" not in what and "long number" not in what:  # seconds each; `make torture` has them
            assert hostile.check(load, f"{kind}: {what}", hostile.peak()) is None
            tried += 1
    assert tried > 40


def test_edited_results_are_read_or_named(tmp_path: Path) -> None:
    good = edits.demo("repl")
    cases = [(path, value) for path in edits.fields(good) for value in edits.VALUES]
    found = {edits.trial(tmp_path, good, case) for case in Random(0).sample(cases, 25)}
    found |= {edits.trial(tmp_path, good, what) for what in edits.ODD}
    assert {"read, compared", "told, comparison refused"} <= found


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_layer_that_computes_its_weight_is_refused_by_name(wrap: object) -> None:
    model = hostile.model()
    for block in model:
        wrap(block.mix)  # type: ignore[operator]
    with pytest.raises(ReplearnError, match=r"1 can't go \(1\.mix computes its weight anew at every call"):
        replearn.plan(model, interval=2, first=2)


@pytest.mark.parametrize("new", ["same class", "another class"])
def test_a_neighbour_that_is_exchanged_later_is_the_one_that_is_read(new: str, tmp_path: Path) -> None:
    model = replearn.models.CifarResNet(20, width=4)
    replearn.replace_(model, replearn.plan(model, interval=2, first=2)).eval()
    x = torch.randn(2, 3, 8, 8)
    if new == "another class":
        model.layer1[0] = nn.Conv2d(4, 4, 3, padding=1)
        with pytest.raises(ReplearnError, match=r"0 is a Conv2d now, without the conv2 that an operator reads"):
            model(x)
        return
    before = model(x)
    model.layer1[0] = copy.deepcopy(model.layer1[2])
    assert not torch.equal(model(x), before)
    replearn.save(model, tmp_path / "model.safetensors")
    again = replearn.load(replearn.models.CifarResNet(20, width=4), tmp_path / "model.safetensors").eval()
    torch.testing.assert_close(again(x), model(x))
    again.layer1[0] = nn.Sequential(again.layer1[0])  # a wrapper: what is in it is read
    torch.testing.assert_close(again(x), model(x))


@pytest.mark.parametrize("way", ["pruning", "weight_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_neighbour_whose_weight_is_computed_later_is_refused(way: str) -> None:
    model = replearn.models.CifarResNet(20, width=4)
    replearn.replace_(model, replearn.plan(model, interval=2, first=2)).eval()
    kept: nn.Module = model.layer1[0].conv2
    prune.random_unstructured(kept, "weight", 0.5) if way == "pruning" else nn.utils.weight_norm(kept)
    with pytest.raises(
        ReplearnError, match=r"0\.conv2\.weight, which an operator reads, is no parameter any more"
    ):
        model(torch.randn(2, 3, 8, 8))
    prune.remove(kept, "weight") if way == "pruning" else nn.utils.remove_weight_norm(kept)
    assert model(torch.randn(2, 3, 8, 8)).isfinite().all()


def test_a_neighbour_without_a_bias_is_told_as_a_misfit() -> None:
    model = hostile.model()
    model[0].mix = nn.Linear(3, 3, bias=False)
    plan = replearn.plan(model, interval=2, first=2)
    assert "comes from the next source alone" in " ".join(plan.targets[0].notes)


def test_nothing_unpickles_or_evaluates_what_it_reads() -> None:
    dangerous = re.compile(r"\bpickle\.loads?\(|(?<!\.)\beval\(|\bexec\(|\byaml\b|torch\.load\(|__import__\(")
    for path in (ROOT / "src").rglob("*.py"):
        for line in path.read_text().splitlines():  # torch.load with weights_only runs nothing
            assert not dangerous.search(line) or "weights_only=True)" in line, f"{path.name}: {line}"


def test_every_committed_result_names_its_format() -> None:
    for path in (ROOT / "benchmarks" / "results").rglob("*.json"):
        data = json.loads(path.read_text())
        for entry in data if isinstance(data, list) else [data]:
            assert str(entry.get("format", "")).startswith("replearn-"), path


@pytest.mark.parametrize(
    "name", ["generated", "hostile", "edits", "threads", "third_party", "kills", "scale", "full_disk"]
)
def test_the_committed_torture_came_to_its_end_without_a_fault(name: str) -> None:
    data = json.loads((RESULTS / f"torture_{name}.json").read_text())
    assert data["finished"]
    assert "faults" not in data["found"]


@pytest.mark.distributed
def test_a_killed_run_resumes_bit_equal(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, "-m", "torture.kills", "--total", "1", "--out", str(tmp_path / "kills.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_every_promise_of_the_security_page_names_a_test_that_exists() -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    assert [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []
