"""The command line: what it trains, what it prints, and how it fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from command_line import call
from rich.console import Console
from runs_made_up import run

from replearn import Plan, __version__
from replearn.cli.progress import Watcher
from replearn.experiments.training.results import Epoch, read_result

TINY = """
from replearn.experiments.training.recipe import Optimizer, Recipe, Variant

RECIPE = Recipe(
    name="tiny",
    table="",
    model="cifar_resnet:20:2",
    data=("digits",),
    variants=(
        Variant(label="E2E", method="e2e"),
        Variant(label="removal", method="removal", first=2),
        Variant(label="RepL first=2", method="repl", first=2),
    ),
    epochs=1,
    batch_size=479,
    optimizer=Optimizer(lr=0.05),
)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, with one small recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPLEARN_DATA", raising=False)
    Path("tiny.py").write_text(TINY)
    return tmp_path


def told(*arguments, code=2):
    """The one line of an error."""
    result = call(*arguments, code=code)
    (line,) = result.stderr.splitlines()
    assert line.startswith("replearn: ")
    assert result.stdout == ""
    return line


# ---- saying things -----------------------------------------------------------------------------


def test_the_version_is_the_packages():
    assert call("--version").stdout.startswith(f"replearn {__version__} (torch ")


def test_help_lists_the_commands_and_each_has_examples():
    commands = ("plan", "train", "compare", "recipes", "data")
    assert all(command in call("--help").stdout for command in commands)
    assert call().stdout == call("--help").stdout
    for command in commands:
        assert f"replearn {command}" in call(command, "--help").stdout.split("Examples:")[1]


def test_plan_prints_the_table_or_the_plan_itself():
    assert "3 of 15 blocks replaced" in call("plan", "resnet32").stdout
    plan = Plan.from_json(call("plan", "resnet32", "--interval", "2", "--operator", "no_weights", "--json").stdout)
    assert len(plan.targets) == 6
    shared = call("plan", "cifar_resnet:20:4", "--targets", "layer1.1", "--operator", "basic:coefficients=shared")
    assert "basic (shared)" in shared.stdout


def test_recipes_are_listed_with_their_claims_and_shown_whole():
    listing = call("recipes").stdout
    assert re.search(r"t1_resnet32 +t1 +resnet32 +cifar10, svhn, stl10", listing)
    shown = call("recipes", "show", "t1_resnet32").stdout
    assert "Command: replearn compare t1_resnet32" in shown
    assert "93.43" in shown
    assert '"lr": 0.8' in shown
    assert json.loads(call("recipes", "show", "demo", "--json").stdout)["name"] == "demo"


def test_data_says_what_is_there_and_where_it_looked(here):
    listing = call("data").stdout
    assert re.search(r"digits +ok +1,437 +360 +in an installed package", listing)
    assert f"looked in {here / 'data' / 'cifar-10-batches-py'}" in listing
    assert "1,437 training and 360 test images, 10 classes" in call("data", "check", "digits").stdout
    missing = call("data", "check", "svhn", "--data-root", "nowhere", code=1).stdout
    assert "nowhere" in missing
    assert "replearn data download svhn" in missing


# ---- training ----------------------------------------------------------------------------------


def test_train_writes_the_run_it_was_asked_for(here):
    said = call("train", "tiny.py", "--method", "repl-first-2", "--seed", "3", "--set", "optimizer.lr=0.01").stdout
    folder = Path("runs/tiny/digits/repl-first-2/seed-3")
    assert str(folder / "result.json") in said
    result = read_result(folder / "result.json")
    assert (result.seed, result.variant["label"], result.finished) == (3, "RepL first=2", True)
    assert result.recipe["optimizer"]["lr"] == 0.01
    assert f"{result.last.measures['test_accuracy']:.2f} %" in said


def test_a_run_that_is_there_is_never_trained_over(here):
    call("train", "tiny.py", "--method", "e2e")
    path = Path("runs/tiny/digits/e2e/seed-0/result.json")
    before = path.read_bytes()
    assert "holds a run that was finished. Add --resume" in told("train", "tiny.py", "--method", "e2e")
    again = call("train", "tiny.py", "--method", "e2e", "--resume").stdout
    assert "in epoch 1 (best" in again
    assert "epochs is 1 there, 2 here" in told("train", "tiny.py", "--method", "e2e", "--epochs", "2", "--resume")
    assert path.read_bytes() == before


def test_compare_trains_what_is_missing_and_nothing_else(here):
    first = call("compare", "tiny.py", "--methods", "e2e,removal", "--seeds", "0")
    assert "tiny: cifar_resnet:20:2 on digits, 1 epoch (" in first.stdout
    kept = Path("runs/tiny/digits/e2e/seed-0/result.json")
    before = kept.stat().st_mtime_ns
    (comparison,) = json.loads(call("compare", "tiny.py", "--seeds", "0-1", "--together", "5", "--json").stdout)
    assert [row["label"] for row in comparison["rows"]] == ["E2E", "removal", "RepL first=2"]
    assert all(row["seeds"] == [0, 1] for row in comparison["rows"])
    assert comparison["rows"][2]["against_removal"]["verdict"] in ("better", "worse", "undecided")
    assert any("--together 1" in note for note in comparison["notes"])
    assert kept.stat().st_mtime_ns == before
    folder = Path("runs/tiny/digits")
    assert (folder / "comparison.txt").read_text() == call("compare", "--from", "runs").stdout
    assert (folder / "comparison.svg").stat().st_size > 1_000


def test_a_row_that_cannot_be_trained_is_told_before_the_others_are(here):
    recipe = here / "tiny.py"
    wide = 'Variant(label="RepL wide", method="repl", first=2, operator=Basic(correction="low-rank", rank=99))'
    text = recipe.read_text().replace("variants=(", f"variants=({wide}, ")
    recipe.write_text("from replearn.operators import Basic\n" + text)
    said = told("compare", "tiny.py", "--methods", "e2e,repl-wide", "--seeds", "0")
    assert "The row RepL wide can't be trained. " in said
    assert "a correction of rank 99 does not fit" in said
    assert not Path("runs").exists()
    call("compare", "tiny.py", "--methods", "e2e,repl-first-2", "--seeds", "0")


def test_a_campaign_goes_on_elsewhere_from_its_file_alone(here):
    (here / "other.py").write_text((here / "tiny.py").read_text().replace('name="tiny"', 'name="other"'))
    campaign = ("compare", "tiny.py,other.py", "--methods", "e2e,repl-first-2", "--into", "all.jsonl")
    call(*campaign, "--seeds", "0", "--out", "first")
    assert Path("first/other/digits/e2e/seed-0/result.json").exists()
    shutil.rmtree("first")
    before = Path("all.jsonl").read_text().splitlines()
    found = json.loads(call(*campaign, "--seeds", "0-1", "--out", "second", "--json").stdout)
    assert [(each["recipe"], row["seeds"]) for each in found for row in each["rows"]] == [
        *[("tiny", [0, 1])] * 2,
        *[("other", [0, 1])] * 2,
    ]
    assert sorted(path.parent.name for path in Path("second").rglob("result.json")) == ["seed-1"] * 4
    assert len(Path("all.jsonl").read_text().splitlines()) == len(before) + 4
    assert call("compare", "--from", "all.jsonl").stdout.count("E2E  ") == 4
    said = told(*campaign, "--seeds", "0", "--epochs", "2")
    assert "The file of runs holds E2E, seed 0, with other settings (epochs is 1 there, 2 here)" in said
    call("compare", "--from", "second", "--into", "packed.jsonl")
    assert sum('"seed": 1' in line for line in Path("packed.jsonl").read_text().splitlines()) == 4


def test_compare_from_a_folder_only_reads(here):
    for seed in (0, 1):
        for label, accuracy in (("E2E", 92.0), ("RepL", 93.0 + seed / 10)):
            folder = Path("old") / f"{label}{seed}"
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(run(label, seed, accuracy).to_json())
            (folder / "recipe.json").write_text("{}")
    text = call("compare", "--from", "old", "--picture", "p.svg").stdout
    assert "+1.05 [+0.41, +1.69] better" in text
    assert "93.43 ± 0.19" in text
    assert Path("p.svg").exists()
    assert not Path("runs").exists()


# ---- failing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ("plan resnet33", "There is no model 'resnet33'. Did you mean resnet"),
        (
            "plan demo",
            "demo is a recipe. Write its model, cifar_resnet:26:8 (for 3 channels; digits has 1).",
        ),
        ("plan resnet32 --interval 1", "--interval 1: an interval is a whole number of at least 2"),
        ("plan resnet32 --gpu Z9", "--gpu Z9: There is no GPU 'Z9' in the table"),
        ("plan resnet32 --budget blocks=99", "blocks=99, and at most 6 of 15 can go"),
        ("bench steps resnet20 --operators magic", "--operators magic: There is no operator 'magic'; there are"),
        ("plan resnet32 --operator magic", "--operator magic: There is no operator 'magic'; there are"),
        ("plan resnet32 --operator basic:wings=2", "--operator basic:wings=2: The operator 'basic' does not have"),
        (
            "plan resnet20 --operator bottleneck",
            "layer1.1, layer2.1, layer3.1 can't go (the operator 'bott",
        ),
        ("plan resnet20 --budget parameters<=500%", "--budget parameters<=500%: write a number above 0, and a"),
        ("plan resnet20 --budget memory<=1%", "a lighter operator; --operator removal is the floor"),
        ("plan resnet20 --fraction 0.2 --interval 3", "--fraction 0.2 places the targets itself"),
        ("plan google/vit", "MODEL google/vit: there is no run or model in such a folder. A model of the"),
        ("plan tiny.py", "MODEL tiny.py: add the function that returns the model, as tiny.py:FUNCTION"),
        ("plan cifar_resnet:20:0", "of a width, not 20 of 0"),
        ("plan resnet32 --operator basic:shared", "write options as NAME:option=value"),
        ("train t1_resnet31", "Did you mean t1_resnet32"),
        ("train tiny.py --method reply", "--method reply: the recipe tiny has e2e, removal, repl-first-2"),
        ("train tiny.py --data svhn", "--data svhn: the recipe tiny is for digits"),
        ("train t1_resnet32", "was not found. Looked in"),
        ("train tiny.py --device gpu", "--device gpu: There is no device 'gpu'"),
        ("train tiny.py --device cuda:99", "no"),
        ("train tiny.py --epochs 0", "--epochs"),
        ("train tiny.py --wings 2", "No such option: --wings"),
        ("train tiny.py --set wings=2", "no field 'wings'"),
        ("train tiny.py --set optimizer=sgd", "optimizer is an object, not 'sgd'"),
        ("train tiny.py --set variants=[]", "no field 'variants' to set"),
        ("train tiny.py --set optimizer.lr=fast", "optimizer.lr is a finite number, not 'fast'"),
        ("train tiny.py --set batch_size=0", "batch_size=0: must be at least 1"),
        ("train tiny.py --set batch_size=1.5", "batch_size is a whole number from 0 on, not 1.5"),
        ("train tiny.py --set augment=3", "augment is an object, not 3"),
        ("train tiny.py --set optimizer.lr=-1", "optimizer.lr=-1.0: must be a finite number, and not below 0"),
        ("train tiny.py --set optimizer.lr=NaN", "optimizer.lr is a finite number, not nan"),
        ("train tiny.py --set schedule.warmup_epochs=-1", "schedule.warmup_epochs=-1.0: must be a finite number"),
        (
            "train tiny.py --set optimizer.betas=[0.9,1]",
            "optimizer.betas=[0.9, 1.0]: must lie between 0 and 1, below 1",
        ),
        ("train tiny.py --set text.sequence_length=0", "text.sequence_length=0: must be at least 1"),
        ("train tiny.py --set optimizer.betas=[2,3]", "optimizer.betas=[2.0, 3.0]: must lie between 0 and 1"),
        ("train tiny.py --set label_smoothing=5", "label_smoothing=5.0: must lie between 0 and 1"),
        ("train tiny.py --set precision=int8", "precision is one of float32, tf32, bfloat16, float16"),
        ("train tiny.py --set augment.digits.wings=2", "no field 'wings'"),
        ("train tiny.py --set augment.digits.flip=3", "augment.digits.flip is true or false, not 3"),
        ("train tiny.py --set epochs", "write field=value"),
        ("train tiny.py --set epochs=0", "--set epochs=0: "),
        ("compare", "Name a recipe"),
        ("compare tiny.py demon", "Did you mean demo"),
        ("compare tiny.py --seeds 3-1", "--seeds 3-1: write whole numbers"),
        ("compare tiny.py --picture a.txt", "a.txt is no name of a picture"),
        ("compare demo --from runs", "one of both"),
        ("compare tiny.py --method nope", "--method nope: the recipe tiny has e2e, removal"),
        ("compare tiny.py --seeds ,", "'--seeds': it names nothing"),
        ("compare tiny.py --seeds one", "write whole numbers"),
        ("compare tiny.py --methods ,", "'--methods' / '--method': it names nothing"),
        ("compare --from nowhere", "There is no folder nowhere"),
        ("compare --from .", "There are no result files below ."),
        ("data check mnist", "There is no data set 'mnist'"),
        ("recipes show demon", "Did you mean demo"),
        ("export nowhere -o x.foo", "or write --format pt2"),
        ("recipes demo", "No such command 'demo'. See `replearn recipes --help`."),
        ("deploy", "No such command 'deploy'. There is `replearn export`: Deploy a trained model"),
        ("fly", "No such command 'fly'. See `replearn --help`."),
        ("pln resnet20", "No such command 'pln'. Did you mean 'plan'? See `replearn --help`."),
    ],
)
def test_an_error_is_one_line_with_the_cure(here, arguments, cure):
    assert cure in told(*arguments.split())
    assert not Path("runs").exists()


def test_settings_of_every_kind_reach_the_recipe(here):
    changes = ["optimizer.betas=[0.9, 0.95]", "augment.digits.pad=1", "clip_norm=1", "precision=tf32"]
    call("train", "tiny.py", *(word for change in changes for word in ("--set", change)))
    recipe = json.loads(Path("runs/tiny/digits/repl-first-2/seed-0/recipe.json").read_text())
    assert recipe["optimizer"]["betas"] == [0.9, 0.95]
    assert recipe["augment"]["digits"]["pad"] == 1
    assert (recipe["clip_norm"], recipe["precision"]) == (1, "tf32")


def start(*arguments, **settings):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "replearn", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **settings
    )


def test_ctrl_c_ends_with_130_and_one_line_that_names_the_checkpoint(here):
    endless = ("train", "tiny.py", "--epochs", "100000", "--out", "long")
    process = start(*endless, cwd=here)
    log = here / "long/digits/repl-first-2/seed-0/log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 1):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert out == ""
    assert "\x1b" not in said  # not a terminal: no bars
    (line,) = said.splitlines()
    checkpoint = "long/digits/repl-first-2/seed-0/checkpoint.safetensors"
    assert line == f"replearn: Interrupted; resume from {checkpoint}."
    assert (here / checkpoint).exists()
    assert "holds a run that was begun. Add --resume" in told(*endless)


def test_without_typer_the_command_line_names_the_extra(here):
    blocked = "import sys; sys.modules['typer'] = None; from replearn.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "replearn: the command line needs typer: pip install 'replearn[train]'\n"


# ---- watching ----------------------------------------------------------------------------------


def epoch(number, accuracy):
    return Epoch(
        epoch=number,
        measures={"train_loss": 1.0, "test_loss": 1.0, "test_accuracy": accuracy},
        lr=0.1,
        seconds=1.5,
        images_per_second=2000.0,
        peak_memory=3 * 10**9,
    )


def watch(watcher):
    watcher.begin(["a run"])
    watcher.step(0, 1, 5, 10, 1234.5, 2 * 10**9)
    watcher.note(0, "step captured")
    watcher.note(0, "step captured")
    watcher.epoch(0, epoch(1, 91.0))
    watcher.epoch(0, epoch(2, 90.0))


def test_bars_show_speed_memory_and_time_left_and_leave_a_line():
    stream = StringIO()
    bars = Watcher(2, 2, console=Console(file=stream, force_terminal=True, width=150))
    watch(bars)
    bars.bars.refresh()
    assert "epoch 2/2  2,000 images/s  3.0 GB  90.00 %" in stream.getvalue()
    assert "run 1 of 2: a run" in stream.getvalue()
    assert "left" in stream.getvalue()
    bars.end()
    bars.bars.stop()
    assert stream.getvalue().count("a run: step captured") == 1
    assert "a run: 90.00 % in epoch 2 (best 91.00 in epoch 1), 1.50 s/epoch" in stream.getvalue()


def test_lines_are_few_and_plain(capsys):
    lines = Watcher(2, 2)
    watch(lines)
    lines.end()
    assert capsys.readouterr().err.splitlines() == [
        "a run: step captured",
        "a run: 90.00 % in epoch 2 (best 91.00 in epoch 1), 1.50 s/epoch",
    ]
