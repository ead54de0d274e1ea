"""Weights of a trained classifier in the backbone of a detector or a segmenter, plan included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import narrow
import pytest
import test_segmentation as segmentation
import tiny
import torch
from safetensors.torch import save_file
from scenes import any_count, write_camvid
from torch import Tensor, nn
from torchvision.models import get_model

import replearn
from replearn import ReplearnError
from replearn.experiments.training.fit import fit
from replearn.experiments.training.pretrained import load_pretrained_, start_backbone_
from replearn.experiments.training.recipe import Detection
from replearn.experiments.training.scene_models import detector, segmenter
from replearn.surgery.weights import load_backbone_

narrow.register()


def classifier(name: str = "resnet_narrow_bottleneck", operator: Any = None, **placement: Any) -> nn.Module:
    """Replaced, with weights and statistics that are nobody's start."""
    torch.manual_seed(3)
    model: nn.Module = get_model(name, weights=None, num_classes=10)
    if placement:
        replearn.replace_(model, replearn.plan(model, operator=operator, **placement))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return model.eval()


def body_of(model: nn.Module, at: str, images: torch.Tensor) -> torch.Tensor:
    """What the four stages of a backbone come to."""
    part = model.get_submodule(at) if at else model
    x = part.maxpool(part.relu(part.bn1(part.conv1(images))))  # type: ignore[operator]
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        x = part.get_submodule(stage)(x)
    return x  # type: ignore[no-any-return]


@pytest.mark.parametrize("operator", [None, replearn.operators.ReducedBottleneck(correction="low-rank", rank=2)])
def test_a_replaced_classifier_becomes_a_detector_s_backbone(tmp_path: Path, operator: Any) -> None:
    trained = classifier(operator=operator, interval=4, first=2)
    replearn.save(trained, tmp_path / "classifier.safetensors")
    model = detector("retinanet_resnet_narrow_bottleneck", num_classes=3).eval()
    head = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("head.")}
    report = load_backbone_(model, tmp_path / "classifier.safetensors")
    assert report.at == "backbone.body"
    assert report.plan is not None
    assert [target.name for target in report.plan.targets] == [f"backbone.body.layer{n}.1" for n in (1, 2, 3, 4)]
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(body_of(model, "backbone.body", images), body_of(trained, "", images))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in head.items())
    own = sum(name.startswith("backbone.body.") for name in model.state_dict())
    assert len(report.loaded) == own
    assert report.unused == ("fc.bias", "fc.weight")
    assert report.outside == len(model.state_dict()) - own
    text = str(report)
    assert f"{own} tensors loaded into backbone.body" in text
    assert "4 blocks replaced as its plan says: backbone.body.layer1.1" in text
    assert "not used, since the backbone has none: fc.bias, fc.weight" in text
    replearn.save(model, tmp_path / "detector.safetensors")  # the plan is the detector's own now
    small = Detection(min_size=64, max_size=64)
    again = detector("retinanet_resnet_narrow_bottleneck", num_classes=3, settings=small)
    replearn.load(again, tmp_path / "detector.safetensors")
    target = {"boxes": torch.tensor([[4.0, 4, 30, 30]]), "labels": torch.tensor([1])}
    losses = again.train()([torch.rand(3, 64, 64)], [target])
    sum(losses.values()).backward()
    assert again.get_submodule("backbone.body.layer1.1").norm.weight.grad is not None  # type: ignore[union-attr]


def test_a_dilated_segmenter_takes_the_plan_of_a_strided_classifier(tmp_path: Path) -> None:
    trained = classifier(interval=4, first=2)
    replearn.save(trained, tmp_path / "c.safetensors")
    model = segmenter("deeplabv3_resnet_narrow_bottleneck", num_classes=5, auxiliary=True)
    report = load_backbone_(model, tmp_path / "c.safetensors")
    assert report.at == "backbone"
    assert torch.equal(
        model.get_submodule("backbone.layer4.0.conv2").weight,  # type: ignore[arg-type]
        trained.get_submodule("layer4.0.conv2").weight,  # type: ignore[arg-type]
    )
    assert model.eval()(torch.randn(1, 3, 48, 48))["out"].shape == (1, 5, 48, 48)


def test_deeplabv3plus_takes_it_too(tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    trained = get_model("resnet34", weights=None)
    replearn.replace_(trained, replearn.plan(trained, interval=4, first=2))
    replearn.save(trained, tmp_path / "c.safetensors")
    report = load_backbone_(segmenter("deeplabv3plus_resnet34", num_classes=5), tmp_path / "c.safetensors")
    assert report.at == "encoder"
    assert report.plan is not None
    assert len(report.plan.targets) == 4


def test_whole_classifiers_are_taken_as_files_and_state_dicts(tmp_path: Path) -> None:
    trained = classifier()
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    model = detector("retinanet_resnet_narrow_bottleneck", num_classes=3)
    assert load_backbone_(model, trained.state_dict()).plan is None
    fresh = detector("retinanet_resnet_narrow_bottleneck", num_classes=3)
    text = start_backbone_(fresh, str(tmp_path / "weights.pth"))
    assert text.startswith(f"{tmp_path / 'weights.pth'}: ")
    for name, tensor in trained.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(fresh.state_dict()[f"backbone.body.{name}"], tensor)


def test_what_does_not_fit_is_told_and_the_model_is_unchanged(tmp_path: Path) -> None:
    replearn.save(classifier("resnet_narrow", interval=4, first=2), tmp_path / "basic.safetensors")
    model = detector("retinanet_resnet_narrow_bottleneck", num_classes=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lacking = {name: t for name, t in classifier().state_dict().items() if not name.startswith("layer2.0.conv2")}
    wider = {**classifier().state_dict(), "conv1.weight": torch.zeros(32, 3, 7, 7)}
    for source, told in (
        (
            tmp_path / "basic.safetensors",
            r"basic\.safetensors can.t be carried out on backbone\.body\.\*",
        ),
        (lacking, r"does not fill backbone\.body of this Detector\. \S+\.layer2\.0\.conv2\.weight is missing"),
        (wider, r"conv1\.weight is 32x3x7x7 there, 64x3x7x7 here"),
        ({"blocks.0.w": torch.zeros(1)}, r"No part of this Detector has the tensors of the state dict"),
        (tmp_path / "none.safetensors", r"There is no file .*none\.safetensors to start from"),
    ):
        with pytest.raises(ReplearnError, match=told):
            load_backbone_(model, source)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@any_count()
def test_recipes_start_each_row_from_its_own_classifier_and_say_what_was_loaded(tmp_path: Path) -> None:
    write_camvid(tmp_path / "data" / "camvid", train=4, test=2)
    for slug, placement in (("e2e", {}), ("repl", {"interval": 4, "first": 2})):
        (tmp_path / slug).mkdir()
        trained = classifier(**placement)
        path = tmp_path / slug / "model.safetensors"
        if placement:
            replearn.save(trained, path)
        else:
            from safetensors.torch import save_file

            save_file({name: tensor.contiguous() for name, tensor in trained.state_dict().items()}, path)
    changes = {"epochs": 1, "pretrained": str(tmp_path / "{method}" / "model.safetensors")}
    rows = ("E2E", "RepL")
    specs = [segmentation.spec(tmp_path / "out" / row, tmp_path / "data", row, **changes) for row in rows]
    e2e, repl = (fit([spec], device="cpu")[0] for spec in specs)
    assert e2e.plan is None
    assert repl.plan is not None
    assert repl.plan["placement"] == "as in a Narrow (interval=4, first=2)"
    assert repl.parameters < e2e.parameters
    for result in (e2e, repl):
        assert any("tensors loaded into backbone" in note for note in result.notes)
    wrong = {**changes, "pretrained": str(tmp_path / "repl" / "model.safetensors")}
    for label in ("E2E", "removal"):
        told = rf"The row {label} .*can't start from these weights: it asks for .*\{{method\}}"
        with pytest.raises(ReplearnError, match=told):
            fit([segmentation.spec(tmp_path / "no", tmp_path / "data", label, **wrong)], device="cpu")
    whole = str(tmp_path / "e2e" / "model.safetensors")  # blocks are replaced after it is loaded
    start = {**changes, "pretrained": whole}
    (after,) = fit([segmentation.spec(tmp_path / "after", tmp_path / "data", "RepL", **start)], device="cpu")
    assert after.plan is not None
    assert after.plan["placement"] == "interval=4, first=2"


def odd(kind: str) -> Tensor:
    """A tensor in the shape of conv1.weight that no weight is."""
    weight = tiny.resnet().state_dict()["conv1.weight"]
    makers: dict[str, Callable[[], Tensor]] = {
        "quantized": lambda: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        "sparse": lambda: weight.to_sparse(),
        "meta": lambda: weight.to("meta"),
        "int8": lambda: weight.to(torch.int8),
        "complex": lambda: weight.to(torch.complex64),
        "nan": lambda: weight.fill_(float("nan")),
        "too large": lambda: weight.double() * 1e300,
    }
    return makers[kind]()


@pytest.mark.parametrize("kind", ["quantized", "sparse", "meta", "int8", "complex", "nan", "too large"])
@pytest.mark.parametrize("way", ["backbone", "pretrained"])
def test_weights_that_are_none_leave_the_model_as_it_was(kind: str, way: str, tmp_path: Path) -> None:
    def load(model: nn.Module) -> None:
        if way == "backbone":
            load_backbone_(model, state)
        else:
            load_pretrained_(model, str(tmp_path / "weights.pth"))

    model, state = tiny.resnet(), {**tiny.resnet().state_dict(), "conv1.weight": odd(kind)}
    state = dict(reversed(state.items()))  # so that others would be copied first
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(
        ReplearnError, match=r"can't be loaded: conv1\.weight .*The model is unchanged|holds more than"
    ):
        load(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def packed(path: Path) -> None:
    """A file of torch.save, with a pickle that grows a thousand times as it is read."""
    torch.save(tiny.resnet().state_dict(), path)
    with ZipFile(path) as given:
        entries = {entry.filename: given.read(entry) for entry in given.infolist()}
    with ZipFile(path, "w", ZIP_DEFLATED) as made:
        for name, data in entries.items():
            made.writestr(name, data + b"\0" * (2**24 if name.endswith("data.pkl") else 0))


def test_a_file_in_a_small_float_is_loaded(tmp_path: Path) -> None:
    given = tiny.resnet().state_dict()
    state = {name: t.to(torch.float8_e4m3fn) if t.is_floating_point() else t for name, t in given.items()}
    torch.save(state, tmp_path / "weights.pth")
    load_pretrained_(model := tiny.resnet(), str(tmp_path / "weights.pth"))
    torch.testing.assert_close(model.state_dict()["conv1.weight"], state["conv1.weight"].float())


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda f: torch.save({3: torch.ones(2)}, f), id="integer keys"),
        pytest.param(lambda f: f.write_bytes(b"\x80\x02}q\x00(X\x01."), id="cut pickle"),
        pytest.param(lambda f: f.write_bytes(b"\x80\x02N0."), id="empty stack"),
        pytest.param(lambda f: f.write_bytes(b""), id="nothing"),
        pytest.param(
            lambda f: torch.save({"a": torch.nested.nested_tensor([torch.ones(2)])}, f), id="nested tensor"
        ),
        pytest.param(lambda f: packed(f), id="zip bomb"),
    ],
)
def test_a_malformed_weight_file_is_refused_by_name(wrong: Callable[[Path], Any], tmp_path: Path) -> None:
    wrong(tmp_path / "weights.pth")
    with pytest.raises(ReplearnError, match=r"weights\.pth (can't be read|holds no state dict)"):
        load_pretrained_(tiny.resnet(), str(tmp_path / "weights.pth"))


def test_a_file_with_deep_json_beside_its_weights_is_loaded(tmp_path: Path) -> None:
    file, given = tmp_path / "weights.safetensors", tiny.resnet()
    save_file(given.state_dict(), file, {"about": "[" * 100_000})
    model = tiny.resnet()
    load_pretrained_(model, str(file))
    assert torch.equal(model.conv1.weight, given.conv1.weight)
