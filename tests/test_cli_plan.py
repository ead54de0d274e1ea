"""`replearn plan` with predicted costs and budgets."""

import command_line
import pytest
import torch

import replearn
from replearn import Plan
from replearn.cli.subjects import subject_named
from replearn.experiments.training.trained import read_full_model


def call(*arguments, code=0, model="cifar_resnet:20:4"):
    named = [] if model is None else [model]
    return command_line.call("plan", *named, *arguments, code=code)


def test_a_plan_shows_what_it_is_predicted_to_save():
    text = call("--first", "2", "--gpu", "T4", "--batch-size", "8").output
    for word in (
        "3 of 9 blocks replaced",
        "deployed",
        "8x3x32x32 float32",
        "optimizer state",
        "T4 (data sheet",
    ):
        assert word in text


def test_a_budget_chooses_and_explains():
    text = call("--budget", "parameters<=90%", "--batch-size", "2").output
    for word in ("budget parameters<=90%", "deployed", "optimizer state"):
        assert word in text
    plan = Plan.from_json(call("--budget", "parameters<=90%", "--batch-size", "2", "--json").output)
    assert plan.deployed_after <= 0.9 * plan.deployed_before
    assert "budget blocks=2, by count" in call("--budget", "blocks=2", "--batch-size", "2").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "abacus"), "There is no GPU 'abacus'"),
        (("--gpu", "T4", "--probe"), "give one of them"),
        (("--budget", "memory<=1%", "--batch-size", "2"), "the most that can go, bring it to"),
        (("--budget", "memory<=90%", "--first", "2"), "--budget chooses the targets"),
        (("--first", "2", "--precision", "half"), "--precision half"),
        (("--first", "9"), "(--interval 4, --first 9)"),
        (("--first", "9"), "Try --first 2, a smaller interval"),
        (("--operator", "bottleneck"), "Try --operator basic."),
        (("--operator", "bottleneck", "--fraction", "0.2"), "more. Try --operator basic."),
        (("--operator", "bottleneck", "--targets", "layer1.1"), "Try --operator basic."),
        (("--budget", "latency<75"), "--budget latency<75"),
        (("--budget", "parameters<=90%,latency<=75%"), "give --gpu H100"),
        (
            ("--operator", "basic:corection=full"),
            "does not have these options: 'corection'; it has sources, stop_gradient, correction, rank",
        ),
    ],
)
def test_what_cannot_work_is_said(arguments, words):
    assert words in call(*arguments, code=2).stderr


def test_language_models_are_planned_on_tokens():
    text = call("--first", "2", "--batch-size", "2", "--length", "16", model="lm:32:6:2:64").output
    assert "TransformerLM: 1 of 6 blocks replaced" in text
    assert "a batch of 2x16 int64, 2x16 int64" in text
    model, (words, targets) = subject_named("lm:32:6:2:64", 2, 16)
    assert (words.shape, targets.shape) == ((2, 16), (2, 16))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.fixture
def gpt2(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=5, n_embd=16, n_head=2, vocab_size=50, n_positions=32)
    config.save_pretrained(tmp_path / "gpt2")
    return f"hf:{tmp_path / 'gpt2'}"


def test_hugging_face_models_are_planned_from_a_config_or_a_type(gpt2):
    text = call("--first", "2", "--batch-size", "2", "--length", "64", model=gpt2).output
    assert "GPT2LMHeadModel: 1 of 5 blocks replaced" in text
    model, batch = subject_named(gpt2, 2, 64)
    assert batch["input_ids"].shape == (2, 32)  # no longer than its positions
    assert f"training {sum(parameter.numel() for parameter in model.parameters()):,} -> " in text
    assert subject_named("hf:gpt2", 1, 8)[0].loss_type == "ForCausalLM"
    named, images = subject_named("hf:vit", 3, 8)
    assert type(named).__name__ == "ViTForImageClassification"
    assert images.shape == (3, 3, 224, 224)
    assert type(subject_named("hf:bert", 1, 8)[0]).__name__ == "BertForMaskedLM"
    assert "no type of model" in call(model="hf:abacus", code=2).stderr
    assert "no image classifier and no language model" in call(model="hf:dac", code=2).stderr


def test_a_model_of_the_hub_without_a_network_says_what_to_do(monkeypatch):
    transformers = pytest.importorskip("transformers")

    def unreachable(*given, **more):
        raise OSError("We couldn't connect to 'the hub' to load the files.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    error = " ".join(call(model="hf:some/model", code=2).stderr.split())
    assert "hf:some/model can't be read from the Hugging Face hub or its cache (We couldn't connect" in error
    assert "write hf:FOLDER" in error
    assert "no type of model" not in error


RECIPE = """
from replearn.experiments.training.recipe import Optimizer, Recipe, Variant

RECIPE = Recipe(
    name="tiny", table="", model="cifar_resnet:20:4", data=("digits",), epochs=1, batch_size=479,
    variants=(Variant(label="E2E", method="e2e"),), optimizer=Optimizer(lr=0.05),
)
"""


@pytest.mark.parametrize(
    ("flag", "value"), [("--device", "nonsense"), ("--samples", "50"), ("--data-root", "sets")]
)
def test_a_flag_of_a_trained_run_is_refused_for_a_named_model(flag, value):
    assert f"{flag} {value}: a named model is planned from shapes alone" in call(flag, value, code=2).stderr


def test_a_budget_of_time_names_the_flags_that_tell_the_machine():
    assert (
        "--budget latency<=80% needs to know the machine: give --gpu"
        in call("--budget", "latency<=80%", code=2).stderr
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.py").write_text(RECIPE)
    words = ("train", str(folder / "tiny.py"), "--method", "e2e", "--device", "cpu", "--out", str(folder))
    command_line.call(*words)
    return folder / "digits" / "e2e" / "seed-0"


def test_a_budget_takes_the_blocks_that_change_least_in_a_trained_run(run):
    pytest.importorskip("sklearn")
    words = ["--run", str(run), "--budget", "parameters<=95%", "--score", "similarity", "--samples", "50"]
    plan = Plan.from_json(call(*words, "--device", "cpu", "--json", model=None).output)
    trained = read_full_model(run, torch.device("cpu"))
    data = [images for images, _ in trained.train_batches(50, 10)]
    assert plan.placement == "budget parameters<=95%, by similarity"
    assert plan == replearn.plan(trained.model, budget="parameters<=95%", score="similarity", data=data)


@pytest.mark.parametrize(
    ("arguments", "model", "words"),
    [
        ((), None, "Name a model"),
        (("--run", "nowhere"), "resnet32", "one of them"),
        (("--run", "nowhere"), None, "There is no run at nowhere"),
        (("--budget", "memory<=90%", "--score", "similarity"), "resnet32", "give --budget and --run"),
        (("--score", "luck"), "resnet32", "--score luck: write one of count, similarity"),
    ],
)
def test_a_score_needs_a_run_and_a_budget(arguments, model, words):
    assert words in " ".join(call(*arguments, model=model, code=2).stderr.split())


def test_an_own_function_is_planned_like_a_named_model_and_memory_is_the_budgets(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch, replearn\n\ndef net():\n")
    with file.open("a") as more:
        more.write("    return replearn.models.CifarResNet(20), torch.randn(2, 3, 32, 32)\n")
    own = call("--budget", "memory<=85%", model=f"{file}:net").output
    assert own == call("--budget", "memory<=85%", model="resnet20").output
    (memory,) = [line for line in own.splitlines() if line.startswith("memory, added up")]
    assert float(memory.split()[-1]) <= 0.85


def test_a_detector_is_built_without_weights_of_its_backbone(monkeypatch):
    torchvision = pytest.importorskip("torchvision")

    def refused(*_, **__):
        raise AssertionError("weights are fetched")

    monkeypatch.setattr(torchvision.models._api.WeightsEnum, "get_state_dict", refused)
    text = call("--operator", "reduced_bottleneck", model="torchvision:fasterrcnn_resnet50_fpn").output
    assert "reduced_bottleneck" in text
    assert "note     its costs can't be predicted" in text
