"""`replearn plan` with predicted costs and budgets."""

import json

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from replearn import Plan
from replearn.cli.app import app


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["plan", "cifar_resnet:20:4", *arguments], prog_name="replearn")
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_a_plan_shows_what_it_is_predicted_to_save(tmp_path):
    file = tmp_path / "promise.json"
    text = call("--first", "2", "--gpu", "T4", "--batch", "8", "--promise", str(file)).output
    for word in ("3 of 9 blocks replaced", "activation memory", "optimizer state", "time of a step", "T4"):
        assert word in text
    assert json.loads(file.read_text())["machine"]["name"] == "T4"


def test_a_budget_chooses_and_explains():
    text = call("--budget", "parameters<=80%", "--batch", "2").output
    for word in ("budget parameters<=80%", "saves parameters", "the least that is reachable"):
        assert word in text
    plan = Plan.from_json(call("--budget", "parameters<=80%", "--batch", "2", "--json").output)
    assert plan.parameters_after <= 0.8 * plan.parameters_before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "abacus"), "There is no GPU 'abacus'"),
        (("--gpu", "T4", "--probe"), "give one of them"),
        (("--budget", "memory<=1%", "--batch", "2"), "the least that can be reached"),
        (("--budget", "memory<=90%", "--first", "2"), "--budget chooses the targets"),
        (("--first", "2", "--precision", "half"), "precision='half'"),
    ],
)
def test_what_cannot_work_is_said(arguments, words):
    assert words in call(*arguments, code=2).stderr
