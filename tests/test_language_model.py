"""The language model: its loss, its blocks, and training it through the engine."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from test_engine import measured, same_checkpoints, stopped_and_resumed
from texts import text_root  # noqa: F401
from torch.nn.functional import cross_entropy

import replearn
from replearn import ReplearnError, operators
from replearn.experiments import recipes
from replearn.experiments.training.compare import compare
from replearn.experiments.training.comparison_table import comparison_table
from replearn.experiments.training.fit import fit
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.recipe import Recipe, Text, Variant
from replearn.experiments.training.results import read_result
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.tasks import task_named
from replearn.experiments.training.trained import read_trained
from replearn.models import TransformerLM
from replearn.models.linear_cross_entropy import linear_cross_entropy


def model(**changes: object) -> TransformerLM:
    settings = {"dim": 16, "depth": 6, "num_heads": 2, "hidden": 32, "max_length": 12, **changes}
    torch.manual_seed(0)
    return TransformerLM(30, **settings)  # type: ignore[arg-type]


# ---- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_loss_in_pieces_is_the_loss_and_so_are_its_gradients(rows: int) -> None:
    hidden = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 6, -100, 2, 2], [1, -100, 3, 5, 4]])
    (3 * linear_cross_entropy(hidden, weight, targets, rows)).backward()
    found = (hidden.grad.clone(), weight.grad.clone())  # type: ignore[union-attr]
    hidden.grad = weight.grad = None
    expected = 3 * cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    expected.backward()
    made = linear_cross_entropy(hidden, weight, targets, rows)
    torch.testing.assert_close(3 * made, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, (hidden.grad, weight.grad), rtol=1e-10, atol=1e-12)


def test_the_loss_without_targets_that_count_is_zero_and_moves_nothing() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()  # type: ignore[union-attr]
    assert not weight.grad.any()  # type: ignore[union-attr]


# ---- the model ----------------------------------------------------------------------------------


def test_the_paper_s_model_has_the_paper_s_shape() -> None:
    with torch.device("meta"):
        tied, untied = TransformerLM(28_783), TransformerLM(28_783, tied=False)
    count = sum(parameter.numel() for parameter in tied.parameters())
    block = 4 * 512 * 512 + 2 * 512 * 2048 + 3 * 512 + 512 + 2048 + 512 + 4 * 512
    assert count == 28_783 * 512 + 128 * 512 + 12 * block + 2 * 512
    assert sum(parameter.numel() for parameter in untied.parameters()) == count + 28_783 * 512
    assert len(replearn.plan(tied, interval=4, first=2).targets) == 3


def test_a_word_does_not_see_those_after_it() -> None:
    lm = model().eval()
    words = torch.randint(30, (2, 12))
    changed = words.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 30
    assert torch.equal(lm(words)[:, :7], lm(changed)[:, :7])
    assert not torch.allclose(lm(words)[:, 7:], lm(changed)[:, 7:])
    torch.testing.assert_close(
        lm(words[:, :-1], words[:, 1:]), cross_entropy(lm(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    )


@pytest.mark.parametrize(
    "operator", [operators.Projection(), operators.HeadWise(), operators.AttentionMLP(), operators.WholeBlock()]
)
def test_replaced_language_models_train_save_load_and_deploy(operator: operators.Options, tmp_path: Path) -> None:
    lm = model()
    replearn.replace_(lm, replearn.plan(lm, interval=2, first=2, operator=operator))
    words = torch.randint(30, (2, 12))
    lm(words, words).backward()
    assert all(p.grad is not None for name, p in lm.named_parameters() if name.endswith((".a", ".b")))
    assert lm.head.weight is lm.words.weight
    replearn.save(lm, tmp_path / "lm.safetensors")
    again = replearn.load(model(), tmp_path / "lm.safetensors").eval()
    assert torch.equal(again(words), lm.eval()(words))
    replearn.deploy(lm, example=words)


def test_what_the_model_cannot_do_is_refused() -> None:
    with pytest.raises(
        ReplearnError, match=r"A sequence of 13 words is longer than the 12 positions.*max_length=13"
    ):
        model()(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ReplearnError, match="width 16 can't have 3 heads"):
        model(num_heads=3)
    with pytest.raises(ReplearnError, match=r"dropout=1\.5 is no share"):
        model(dropout=1.5)


WORDS = torch.zeros(2, 12, dtype=torch.int64)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (WORDS + 30, r"The words hold the number 30, .* has 30 words, 0 to 29\. .*vocabulary that the model was"),
        (WORDS - 1, r"The words hold the number -1"),
        (WORDS.float(), r"int64 tensor of shape \(batch, length\).*this is torch\.float32 of shape \(2, 12\)"),
        (WORDS[0], r"this is torch\.int64 of shape \(12,\)"),
        ([[1, 2]], "this is list"),
        (WORDS[:, :0], r"There are no words in a tensor of shape \(2, 0\)"),
    ],
)
def test_words_that_are_no_numbered_words_of_the_vocabulary_are_refused(words: torch.Tensor, told: str) -> None:
    with pytest.raises(ReplearnError, match=told):
        model()(words)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (WORDS + 30, "The targets hold the number 30"),
        (WORDS - 5, "The targets hold the number -5"),
        (WORDS[:, :4], r"words of shape \(2, 12\) can't have targets of shape \(2, 4\)"),
        (WORDS.float(), "The targets of a language model are an int64 tensor"),
    ],
)
def test_targets_that_are_no_words_are_refused_but_not_the_ignored(targets: torch.Tensor, told: str) -> None:
    with pytest.raises(ReplearnError, match=told):
        model()(WORDS, targets)
    ignored = torch.full_like(WORDS, -100)
    assert model()(WORDS, ignored) == 0


# ---- through the engine -------------------------------------------------------------------------


def recipe(**changes: object) -> Recipe:
    base = recipes.recipe("tab_wikitext2")
    text = Text(sequence_length=8, min_count=2)
    variants = tuple(dataclasses.replace(v, interval=2) for v in base.variants if v.method != "removal")
    removal = Variant(label="removal", method="removal", interval=2, first=2)
    small = {"model": "lm:16:4:2:32", "epochs": 2, "batch_size": 16, "text": text, "precision": "float32"}
    optimizer = dataclasses.replace(base.optimizer, lr=3e-3)
    return dataclasses.replace(
        base,
        **{**small, "optimizer": optimizer, "variants": (*variants, removal), **changes},  # type: ignore[arg-type]
    )


def spec(root: Path, out: Path, label: str = "RepL projection", seed: int = 0, **changes: object) -> RunSpec:
    made = recipe(**changes)
    return RunSpec(recipe=made, variant=made.variant(label), data="wikitext2", seed=seed, out=out, data_root=root)


def test_every_row_of_the_recipe_learns_and_rows_compare_by_perplexity(
    text_root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    runs = [
        spec(text_root, tmp_path / f"{i}{seed}", variant.label, seed)
        for i, variant in enumerate(recipe().variants)
        for seed in (0, 1)
    ]
    results = fit(runs, device="cpu")
    for run, result in zip(runs, results, strict=True):
        first, last = (epoch.measures["test_perplexity"] for epoch in result.epochs)
        assert last < first < 40
        assert last == pytest.approx(math.exp(result.last.measures["test_loss"]))
        assert result.score == last
        assert result.best == result.last  # the lowest perplexity is the best
        assert read_result(run.out / "result.json") == result
        read = read_trained(run.out)  # the words are counted in the file: the text is not needed
        assert read.model(read.example).shape == (2, 8, read.model.head.out_features)
        # from the first word to the last: an export is compared on random words between those of the example
        assert (int(read.example.min()), int(read.example.max())) == (0, read.model.head.out_features - 1)
    (comparison,) = compare(results)
    assert comparison.metric.name == "perplexity"
    text = comparison_table(comparison)
    assert "perplexity is the last epoch's (lower is better)" in text
    assert "195.42 ± 1.84" in text
    worse = [
        dataclasses.replace(r, epochs=r.epochs[:1], seed=r.seed) for r in results if r.variant["method"] == "e2e"
    ]
    kept = [r for r in results if r.variant["label"] == "removal"]
    (verdict,) = [row for row in compare([*worse, *kept])[0].rows if row.label == "removal"]
    assert verdict.against_e2e is not None
    assert verdict.against_e2e.mean < 0
    assert verdict.against_e2e.verdict in ("better", "undecided")


def test_a_model_of_another_vocabulary_is_not_judged_on_this_text(text_root: Path, tmp_path: Path) -> None:  # noqa: F811
    run = spec(text_root, tmp_path / "run", "E2E", 0)
    task = task_named("language_modelling")(run, torch.device("cpu"), Processes(), {})
    other = TransformerLM(999, dim=16, depth=2, num_heads=2, hidden=32, max_length=8)
    with pytest.raises(
        ReplearnError, match=r"vocabulary has 999 words, and this text gives \d+: use the text and"
    ):
        task.evaluate(other, nullcontext())


@pytest.mark.parametrize("where", ["between epochs", "inside an epoch"])
def test_a_resumed_run_is_bit_equal_dropout_included(
    where: str,
    text_root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    whole = fit([spec(text_root, tmp_path / "whole")], device="cpu")[0]
    resumed = stopped_and_resumed(spec(text_root, tmp_path / "stopped"), None if where == "between epochs" else 25)
    assert measured(resumed) == measured(whole)
    same_checkpoints(tmp_path / "whole", tmp_path / "stopped")


def test_weights_of_another_vocabulary_or_length_are_refused(text_root: Path, tmp_path: Path) -> None:  # noqa: F811
    (result,) = fit([spec(text_root, tmp_path / "base", "E2E", epochs=1)], device="cpu")
    weights = str(tmp_path / "base" / "model.safetensors")
    tuned = fit([spec(text_root, tmp_path / "on", "E2E", epochs=1, pretrained=weights)], device="cpu")[0]
    assert tuned.last.measures["train_loss"] < result.last.measures["train_loss"]
    other = {"pretrained": weights, "text": Text(sequence_length=8, min_count=200)}  # the full stop alone
    with pytest.raises(ReplearnError, match=r"vocabulary has 15 words, and this text gives 3: use the text and"):
        fit([spec(text_root, tmp_path / "x", **other)], device="cpu")
    longer = {"pretrained": weights, "text": Text(sequence_length=16)}
    with pytest.raises(
        ReplearnError, match=r"positions\.weight is 8x16 there and 16x16 here.*text\.sequence_length"
    ):
        fit([spec(text_root, tmp_path / "x", **longer)], device="cpu")
    with pytest.raises(ReplearnError, match=r"another configuration: words\.weight is 15x16 there and 15x32 here"):
        fit([spec(text_root, tmp_path / "x", pretrained=weights, model="lm:32:4:2:32")], device="cpu")
    heads = {"pretrained": weights, "model": "lm:16:4:4:32"}
    with pytest.raises(ReplearnError, match=r"as lm:16:4:2:32, with 2 heads, and lm:16:4:4:32 has 4\. Write"):
        fit([spec(text_root, tmp_path / "x", **heads)], device="cpu")


def test_a_data_set_of_another_kind_and_unknown_names_are_refused(text_root: Path, tmp_path: Path) -> None:  # noqa: F811
    wrong = dataclasses.replace(spec(text_root, tmp_path / "x"), data="digits")
    with pytest.raises(ReplearnError, match="digits has no min_count, so it is no data set for this task"):
        fit([wrong], device="cpu")
    with pytest.raises(ReplearnError, match=r"wikitext2 is a TextSet, and classification learns from a ImageSet"):
        fit([spec(text_root, tmp_path / "x", task="classification", model="resnet20")], device="cpu")
    with pytest.raises(
        ReplearnError, match="There is no task 'dreaming'; there are classification, detection, language"
    ):
        fit([spec(text_root, tmp_path / "x", task="dreaming")], device="cpu")
    with pytest.raises(ReplearnError, match=r"no language model 'resnet20'. There are transformer_lm_12l_512d"):
        fit([spec(text_root, tmp_path / "x", model="resnet20")], device="cpu")
    untied = fit([spec(text_root, tmp_path / "u", "E2E", epochs=1, model="lm:16:4:2:32:untied")], device="cpu")[0]
    assert (
        untied.parameters
        == fit([spec(text_root, tmp_path / "t", "E2E", epochs=1)], device="cpu")[0].parameters + 15 * 16
    )
