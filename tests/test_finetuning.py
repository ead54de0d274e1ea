"""Starting from trained weights: files, what they are refused for, fitted operators, classes, equal time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import runs_made_up
import torch
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("sklearn")
pytest.importorskip("timm")

from replearn import ReplearnError, operators
from replearn.experiments.training import data
from replearn.experiments.training.comparable import at_equal_time
from replearn.experiments.training.compare import compare
from replearn.experiments.training.comparison_table import comparison_table
from replearn.experiments.training.fit import fit
from replearn.experiments.training.image_batches import DeviceImages
from replearn.experiments.training.pretrained import load_pretrained_
from replearn.experiments.training.recipe import Augment, Optimizer, Recipe, Schedule, Variant
from replearn.experiments.training.run import RunSpec

FULL = operators.Projection(correction="full")
VARIANTS = {
    "E2E": Variant(label="E2E", method="e2e"),
    "removal": Variant(label="removal", method="removal", interval=2),
    "RepL": Variant(label="RepL", method="repl", interval=2),
    "fitted": Variant(label="fitted", method="repl", interval=2, operator=FULL, calibrate=300),
}
LOW, HIGH = (0, 1, 2, 3, 4), (9, 8, 7, 6, 5)


def spec(out: Path, label: str = "E2E", **changes: object) -> RunSpec:
    base = Recipe(
        name="tiny",
        table="",
        model="vit:16:4:2:2",
        data=("digits",),
        variants=tuple(VARIANTS.values()),
        epochs=1,
        batch_size=100,
        optimizer=Optimizer(name="adamw", lr=3e-3),
        schedule=Schedule(warmup_epochs=0.2),
    )
    made = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
    return RunSpec(recipe=made, variant=VARIANTS[label], data="digits", seed=0, out=out)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ViT trained on the digits 0 to 4."""
    out = tmp_path_factory.mktemp("base")
    optimizer = Optimizer(name="adamw", lr=1e-2)
    fit([spec(out, classes=LOW, epochs=15, batch_size=50, optimizer=optimizer)], device="cpu")
    return str(out / "model.safetensors")


def test_rows_start_from_the_trained_weights_and_the_fitted_one_closest(weights: str, tmp_path: Path) -> None:
    # a rate of zero: what is measured is the start
    still = {"pretrained": weights, "classes": LOW, "optimizer": Optimizer(name="sgd", lr=0.0)}
    results = {label: fit([spec(tmp_path / label, label, **still)], device="cpu")[0] for label in VARIANTS}
    loss = {label: result.last.measures["test_loss"] for label, result in results.items()}
    assert loss["E2E"] < 0.8
    assert loss["E2E"] < loss["fitted"] < loss["removal"]
    assert loss["fitted"] < loss["RepL"]
    (note,) = results["fitted"].notes
    assert note.startswith("fitted in ")
    assert "on 300 samples: blocks.1 0." in note


def test_other_classes_get_an_output_layer_of_their_own(weights: str, tmp_path: Path) -> None:
    tuned = {"classes": HIGH, "epochs": 4, "batch_size": 50, "optimizer": Optimizer(name="adamw", lr=5e-3)}
    fresh = fit([spec(tmp_path / "fresh", **tuned)], device="cpu")[0]
    moved = fit([spec(tmp_path / "moved", "fitted", pretrained=weights, **tuned)], device="cpu")[0]
    assert moved.last.measures["train_loss"] < fresh.last.measures["train_loss"]

    def head(classes: tuple[int, ...]) -> torch.Tensor:
        still = {"pretrained": weights, "classes": classes, "optimizer": Optimizer(name="sgd", lr=0.0)}
        fit([spec(tmp_path / str(classes), **still)], device="cpu")
        return load_file(tmp_path / str(classes) / "model.safetensors")["head.weight"]

    assert torch.equal(head(LOW), load_file(weights)["head.weight"])
    assert not torch.equal(head(HIGH), head(LOW))  # five classes too, but others
    three = fit([spec(tmp_path / "three", pretrained=weights, classes=(5, 6, 7))], device="cpu")[0]
    assert three.finished


def test_a_classifier_trained_with_repl_is_fine_tuned(weights: str, tmp_path: Path) -> None:
    tuned = {"epochs": 2, "batch_size": 50, "optimizer": Optimizer(name="adamw", lr=5e-3)}
    first = fit(
        [spec(tmp_path / "repl" / "first", "RepL", classes=LOW, pretrained=weights, **tuned)], device="cpu"
    )[0]
    source = str(tmp_path / "{method}" / "first" / "model.safetensors")
    still = {"pretrained": source, "optimizer": Optimizer(name="sgd", lr=0.0)}
    again = fit([spec(tmp_path / "again", "RepL", classes=LOW, **still)], device="cpu")[0]
    assert again.last.measures["test_loss"] == pytest.approx(first.last.measures["test_loss"], rel=1e-5)
    assert [t["name"] for t in again.plan["targets"]] == [t["name"] for t in first.plan["targets"]]
    fit([spec(tmp_path / "other", "RepL", classes=HIGH, **still)], device="cpu")
    names = ("head.weight", "blocks.0.attn.qkv.weight")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "other"))
    assert [torch.equal(before[name], after[name]) for name in names] == [
        False,
        True,
    ]  # other classes, another head


def test_weights_are_read_from_torch_files_too(weights: str, tmp_path: Path) -> None:
    from replearn.experiments.training.architectures import architecture

    model = architecture("vit:16:4:2:2", num_classes=5, channels=1, size=8)
    load_pretrained_(model, weights)
    state = model.state_dict()
    for name, content in (("a.pth", state), ("b.pt", {"state_dict": state})):
        torch.save(content, tmp_path / name)
    for source in (tmp_path / "a.pth", tmp_path / "b.pt"):
        again = architecture("vit:16:4:2:2", num_classes=5, channels=1, size=8)
        load_pretrained_(again, str(source))
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_weights_that_do_not_fit_are_refused_with_the_reason(weights: str, tmp_path: Path) -> None:
    def told(pattern: str, source: str = weights, label: str = "E2E", **changes: object) -> None:
        with pytest.raises(ReplearnError, match=pattern):
            fit([spec(tmp_path / "x", label, pretrained=source, **changes)], device="cpu")

    told(r"is of another configuration: cls_token is 1x1x16 there and 1x1x32 here", model="vit:32:4:2:2")
    told(r"does not fit this VisionTransformer: it lacks blocks\.4\.", model="vit:16:6:2:2")
    told(r"it holds blocks\.3\..*which the model has not", model="vit:16:3:2:2")
    resize = {"digits": Augment(resize=16)}
    told(r"pos_embed is 1x17x16 there and 1x65x16 here.*another size: set augment\.DATA\.resize", augment=resize)
    told(r"it was trained as vit:16:4:2:2, with 2 heads, and vit:16:4:4:2 has 4", model="vit:16:4:4:2")
    told(r"There is no file .*nothing\.safetensors to start from", source=str(tmp_path / "nothing.safetensors"))
    (tmp_path / "cut.safetensors").write_bytes(Path(weights).read_bytes()[:100])
    told(r"cut\.safetensors can't be read as weights", source=str(tmp_path / "cut.safetensors"))
    (tmp_path / "odd.pt").write_bytes(b"no weights")
    told(
        r"odd\.pt can't be read as weights: it is no file of torch\.save, or holds more than tensors\.",
        source=str(tmp_path / "odd.pt"),
    )
    torch.save([1, 2], tmp_path / "list.pt")
    told(r"list\.pt holds no state dict", source=str(tmp_path / "list.pt"))
    torch.save(nn.Linear(2, 2), tmp_path / "code.pt")
    told(r"code\.pt can't be read as weights", source=str(tmp_path / "code.pt"))
    fit([spec(tmp_path / "repl", "RepL")], device="cpu")
    repl = tmp_path / "repl" / "model.safetensors"
    told(
        r"The row E2E \(e2e\) can't start from these weights: it asks for whole models, and .*interval=2, first=2",
        source=str(repl),
    )
    told(r"The row fitted .* asks for interval=2, first=2, projection \(full\)", source=str(repl), label="fitted")
    torch.save(load_file(repl), tmp_path / "planless.pt")
    told("of a model with replaced blocks: start from one", source=str(tmp_path / "planless.pt"))
    with pytest.raises(
        ReplearnError, match=r"fitted: operators are fitted \(calibrate=300\).*Give it weights: --pre"
    ):
        spec(tmp_path / "x", "fitted")  # before anything is trained


def test_weights_that_do_not_fit_leave_the_model_unchanged(weights: str) -> None:
    from replearn.experiments.training.architectures import architecture

    model = architecture("vit:16:4:2:2", num_classes=5, channels=1, size=16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ReplearnError, match="pos_embed"):
        load_pretrained_(model, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_some_classes_are_numbered_anew_in_their_order() -> None:
    whole = data.load("digits")
    assert isinstance(whole, data.ImageSet)
    part = whole.with_classes((7, 2))
    assert part.num_classes == 2
    assert part.num_train == int(((whole.train_labels == 7) | (whole.train_labels == 2)).sum())
    assert torch.equal(part.test_images[part.test_labels == 0], whole.test_images[whole.test_labels == 7])
    assert torch.equal(part.test_images[part.test_labels == 1], whole.test_images[whole.test_labels == 2])
    for classes in ((1, 1), (0, 10), (3,), (-1, 2)):
        with pytest.raises(
            ReplearnError, match=r"write at least two different classes of digits, each from 0 to 9"
        ):
            whole.with_classes(classes)


def test_small_images_are_enlarged_batch_by_batch_on_the_device() -> None:
    whole = data.load("digits")
    assert isinstance(whole, data.ImageSet)
    plain, large = (DeviceImages(whole, Augment(resize=side), torch.device("cpu")) for side in (None, 24))
    assert (plain.size, large.size) == (8, 24)
    draws = plain.draws(0, 0)[:3]
    small, enlarged = plain.batch(draws)[0], large.batch(draws)[0]
    assert enlarged.shape == (3, 1, 24, 24)
    torch.testing.assert_close(nn.functional.avg_pool2d(enlarged, 3).mean(), small.mean(), rtol=0.05, atol=0.02)
    torch.testing.assert_close(enlarged[..., 1::3, 1::3], small)  # centres of pixels keep their values
    assert large.normalised(large.test_images[:2]).shape == (2, 1, 24, 24)
    smaller = DeviceImages(whole, Augment(resize=4), torch.device("cpu"))
    assert smaller.batch(draws)[0].shape == (3, 1, 4, 4)


# ---- equal time ---------------------------------------------------------------------------------


def test_cheaper_rows_get_the_epochs_that_e2e_s_time_pays_for() -> None:
    made = [
        runs_made_up.run(label, seed, 90.0 + seed, seconds=seconds + (0.2 if seed else -0.2))
        for label, seconds in (("E2E", 2.0), ("removal", 1.1), ("RepL", 1.25), ("RepL first=2", 2.5))
        for seed in (0, 1)
    ]
    longer = at_equal_time(made)
    assert [(row.label, row.epochs) for row in longer] == [("removal at equal time", 4), ("RepL at equal time", 3)]
    assert longer[1].method == "repl"
    with pytest.raises(ReplearnError, match="against E2E, which is not among the methods"):
        at_equal_time(made[2:])
    shared = dataclasses.replace(made[0], notes=("shared its device with other runs",))
    elsewhere = runs_made_up.run("E2E", 0, 90.0, seconds=2.0, gpu="another GPU")
    for odd in (shared, elsewhere):
        with pytest.raises(ReplearnError, match="trained one at a time on the same hardware"):
            at_equal_time([odd, *made[1:]])


def test_a_row_at_equal_time_trains_its_own_epochs_and_is_compared_with_its_own_removal(tmp_path: Path) -> None:
    def trained(label: str, epochs: int | None) -> RunSpec:
        variant = dataclasses.replace(VARIANTS[label], label=f"{label}{epochs or ''}", epochs=epochs)
        return dataclasses.replace(spec(tmp_path / variant.label), variant=variant)

    rows = [("E2E", None), ("removal", None), ("removal", 3), ("RepL", None), ("RepL", 3)]
    results = fit([trained(label, epochs) for label, epochs in rows], device="cpu")
    assert [len(result.epochs) for result in results] == [1, 1, 3, 1, 3]
    assert all(result.finished for result in results)
    (comparison,) = compare(results)
    by_label = {row.label: row for row in comparison.rows}
    expected = by_label["RepL3"].score - by_label["removal3"].score
    assert by_label["RepL3"].against_removal is not None
    assert by_label["RepL3"].against_removal.mean == pytest.approx(expected)
    assert "epochs" in comparison_table(comparison).splitlines()[2]
