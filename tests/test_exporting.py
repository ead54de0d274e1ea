"""Exported files: read back and equal, run without this package, and refused where they can't be right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from zoo import ZOO

import replearn
from replearn import ReplearnError
from replearn.deployment.exporting import export
from replearn.deployment.exporting.export import FORMATS
from replearn.surgery.tensor_file import write_file

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def segmenter() -> nn.Module:
    """DeepLab's head and its way of returning a dict, on a small backbone."""
    models = pytest.importorskip("torchvision").models
    small = models.resnet.ResNet(models.resnet.BasicBlock, [3, 1, 1, 1])
    body = models._utils.IntermediateLayerGetter(small, {"layer4": "out"})
    torch.manual_seed(0)
    head = models.segmentation.deeplabv3.DeepLabHead(512, 3, atrous_rates=(1, 2, 3))
    model = models.segmentation.DeepLabV3(body, head).eval()
    return replearn.replace_(model, replearn.plan(model, first=2))


def subject(name: str) -> tuple[nn.Module, Any]:
    if name == "segmentation":
        return segmenter(), torch.randn(2, 3, 32, 32)
    return ZOO[name].replaced(), ZOO[name].batch()


RUN = """
import sys, importlib.util, torch, onnxruntime
assert importlib.util.find_spec("replearn") is None, "replearn must not be found here"
x, expected = torch.load("pair.pt")
found = torch.export.load("model.pt2").module()(x)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(made,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
torch.testing.assert_close(torch.from_numpy(made), expected, rtol=1e-4, atol=1e-4)
assert "replearn" not in sys.modules
print("equal")
"""


def test_the_files_of_a_resnet_run_where_replearn_is_not_installed(tmp_path: Path) -> None:
    model, x = subject("torchvision_basic")
    plain = replearn.deploy(model, x, merge=True)  # the form furthest from what was trained
    for suffix in ("pt2", "onnx", "safetensors"):
        made = export(plain, tmp_path / f"model.{suffix}", x)
        assert made.path.is_file()
        assert made.batch_sizes == (1, 3)
        assert made.difference < 1e-5
        assert suffix in str(made)
        told = str(made).partition("\nload it without replearn: ")[2]
        assert eval(told, {"torch": torch, "onnxruntime": onnxruntime}) if told else suffix == "safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.pt2", "model.safetensors"]
    other = torch.randn(5, 3, 8, 8)  # a batch size that nothing was traced with
    torch.save((other, plain(other).detach()), tmp_path / "pair.pt")
    script = tmp_path / "run.py"
    # an editable install and PYTHONPATH both lead to replearn: neither is in the path of this process
    clean = [place for place in sys.path if place and not (Path(place) / "replearn").is_dir()]
    finders = "[f for f in sys.meta_path if 'editable' not in repr(f).lower()]"
    head = f"import sys; sys.path[:] = {clean!r}; sys.meta_path[:] = {finders}\n"
    script.write_text(head + RUN)
    done = subprocess.run(
        [sys.executable, "-I", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize(
    ("name", "to", "called"),
    [
        ("timm_vit", "onnx", "output"),
        ("timm_vit", "pt2", ""),
        ("hf_gpt2", "pt2", ""),
        ("hf_gpt2", "safetensors", ""),
        ("hf_vit", "onnx", "logits"),
        ("segmentation", "onnx", "out"),
    ],
)
def test_every_kind_of_model_is_exported_and_read_back(name: str, to: str, called: str, tmp_path: Path) -> None:
    """Sizes and outputs of an ONNX file have names."""
    import onnxruntime

    model, batch = subject(name)
    made = export(replearn.deploy(model, batch, merge=True), tmp_path / f"model.{to}", batch)
    assert (made.format, made.batch_sizes) == (to, (1, 3))
    assert made.difference <= 1e-4
    if to == "onnx":
        session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
        (given,), (out,) = session.get_inputs(), session.get_outputs()
        assert (given.shape[0], out.shape[0], out.name) == ("batch", "batch", called)


def test_weights_of_a_compiled_model_have_their_own_names(tmp_path: Path) -> None:
    model = replearn.models.CifarResNet(8, width=4).eval()
    names, compiled = set(model.state_dict()), torch.compile(model, backend="eager")
    export(compiled, tmp_path / "model.safetensors", torch.randn(2, 3, 8, 8))  # type: ignore[arg-type]
    assert set(load_file(tmp_path / "model.safetensors")) == names


def test_a_file_that_differs_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = subject("cifar_resnet")
    plain = replearn.deploy(model, x)
    (tmp_path / "model.safetensors").write_text("what was there before")
    form = FORMATS["safetensors"]
    wrong = replace(form, read=lambda job, path: lambda given: [1.01 * t for t in form.read(job, path)(given)])
    monkeypatch.setitem(FORMATS, "safetensors", wrong)
    with pytest.raises(ReplearnError, match=r"The safetensors file differs from the model: output 0 by 1\.00e-02"):
        export(plain, tmp_path / "model.safetensors", x)
    assert (tmp_path / "model.safetensors").read_text() == "what was there before"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    model, x = subject("cifar_resnet")
    plain, low = replearn.deploy(model), replearn.deploy(model, dtype=torch.bfloat16)
    without = "Export what deploy gives without dtype"
    for refused, name, example, text in (
        (model, "m.onnx", x, r"still has operators \(layer1.1\). Export replearn.dep"),
        (replearn.deploy(model).train(), "m.onnx", x, "it is in train mode"),
        (low, "m.onnx", x, without),
        (torch.compile(low, backend="eager"), "m.onnx", x, without),
        (plain, "m.bin", x, "end its name with one of .onnx, .pt2, .safetensors"),
        (plain, "no/m.onnx", x, "the folder .* does not exist; create it"),
        (
            plain,
            "m.pt2",
            x[:, :1],
            r"can't be run on the example \(RuntimeError: .*3 channels.*a tensor, a tuple of",
        ),
        (plain, "m.onnx", None, "needs an example of the model's input"),
    ):
        with pytest.raises(ReplearnError, match=text):
            export(refused, tmp_path / name, example)  # type: ignore[arg-type]
    with pytest.raises(ReplearnError, match="There is no format 'tflite'; there are onnx, pt2"):
        export(plain, tmp_path / "m.onnx", x, to="tflite")
    with pytest.raises(ReplearnError, match="which is a folder: name a file in it"):
        export(plain, tmp_path / "..", x, to="pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_command_exports_a_run_and_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("typer.testing")
    from replearn.cli.app import app

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Any:
        return testing.CliRunner().invoke(app, list(arguments), prog_name="replearn")

    Path("mine.py").write_text(
        "import torch, replearn\n"
        "def make():\n    return replearn.models.CifarResNet(20, width=4), torch.randn(2, 3, 8, 8)\n"
    )
    model = replearn.models.CifarResNet(20, width=4)
    replearn.save(replearn.replace_(model, replearn.plan(model, first=2)), "run.safetensors")
    done = call("export", "run.safetensors", "--model", "mine.py:make", "-o", "plain.safetensors")
    assert done.exit_code == 0, done.output
    assert "read back and compared with the model on random input, batch 1, 3" in done.output
    assert "bn1" not in " ".join(__import__("safetensors.torch").torch.load_file("plain.safetensors"))
    done = call("export", "run.safetensors", "-o", "plain.pt2")
    assert done.exit_code == 2
    assert "add --model" in done.output + done.stderr
    for more in (["--model", "mine.py:make"], []):
        done = call("export", "nothing", *more, "-o", "plain.pt2")
        assert "There is no file or folder nothing" in done.output + done.stderr
    write_file(Path("e2e.safetensors"), replearn.models.CifarResNet(20, width=4).state_dict(), {"format": "pt"})
    done = call("export", "e2e.safetensors", "--model", "mine.py:make", "-o", "e2e-plain.safetensors")
    assert done.exit_code == 0, done.output  # the baseline of a comparison, as any library wrote it
    assert (
        call("train", "demo", "--epochs", "1", "--out", "runs", "--set", "model=cifar_resnet:20:2").exit_code == 0
    )
    (folder,) = [path.parent for path in Path("runs").rglob("model.safetensors")]
    done = call("export", str(folder), "-o", "digits.safetensors")
    assert done.exit_code == 0, done.output + done.stderr
