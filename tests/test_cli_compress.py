"""`replearn compress`: from a model and data to a table, a picture and files; and what it refuses, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from command_line import shown

MINE = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return F.relu(x + self.b(F.relu(self.a(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Sequential(*(Block() for _ in range(5)))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))

def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 3, 10, 10)

def no_blocks():
    return nn.Sequential(nn.Flatten(), nn.Linear(300, 4)).eval(), torch.randn(2, 3, 10, 10)

def batches():
    return [torch.randn(8, 3, 10, 10) for _ in range(3)]

def nothing():
    return []
"""


def call(*arguments: str, code: int = 0) -> str:
    return shown("compress", *arguments, "--device", "cpu", code=code)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one's own, a small ViT's folder, and images."""
    import transformers
    from PIL import Image

    folder = tmp_path_factory.mktemp("compress")
    (folder / "mine.py").write_text(MINE)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = transformers.ViTConfig(**shape, image_size=8, patch_size=4)
    transformers.ViTForImageClassification(config).save_pretrained(folder / "vit")
    for number in range(12):
        (folder / "images" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        noise = torch.randint(0, 255, (12 * 10 * 3,), generator=torch.Generator().manual_seed(number))
        Image.frombytes("RGB", (12, 10), bytes(noise.tolist())).save(
            folder / "images" / f"{number % 2}/{number}.png"
        )
    return folder


def test_a_hugging_face_folder_becomes_one_with_fewer_layers(place: Path) -> None:
    import transformers

    out = place / "out"
    told = call(
        f"hf:{place / 'vit'}", "--data", str(place / "images"), "--budget", "blocks=2", "--form", "removal",
        "--heal", "1", "-o", str(out),
    )  # fmt: skip
    assert "ViTForImageClassification: 2 of 5 blocks out (blocks=2), 12 samples" in told
    assert "healed for" in told
    assert "ViTForImageClassification.from_pretrained(" in told
    assert transformers.AutoModelForImageClassification.from_pretrained(out).config.num_hidden_layers == 3
    found = json.loads((out / "compress.json").read_text())
    assert found["standard"]
    assert [point["num_out"] for point in found["curve"]["points"]] == [0, 1, 2]
    assert found["curve"]["kept"] == "agreement"
    assert found["curve"]["points"][0]["kept"] == 100
    assert (out / "compress.png").read_bytes().startswith(b"\x89PNG")
    assert "@media (prefers-color-scheme: dark)" in (out / "compress.svg").read_text()


def test_images_in_a_folder_for_each_class_give_an_accuracy_on_those_not_fitted(place: Path) -> None:
    given = f"hf:{place / 'vit'}", "--data", str(place / "images"), "--budget", "blocks=1"
    for samples, picture in ((8, "none"), (8, str(place / "p.svg")), (12, "none")):
        shown = call(*given, "--samples", str(samples), "--picture", picture, "-o", str(place / "told"))
        accuracy = json.loads((place / "told/compress.json").read_text()).get("accuracy")
        assert (accuracy is None) == (samples == 12)  # of 12 images none is left
        if accuracy is not None:
            assert "accuracy {:.2f} -> {:.2f} %".format(*accuracy) in shown
            assert accuracy[0] in (0, 25, 50, 75, 100)


def test_an_own_model_is_exported_and_json_is_printed(place: Path) -> None:
    out = place / "own"
    told = call(
        f"{place / 'mine.py'}:net", "--data", f"{place / 'mine.py'}:batches", "--budget", "parameters<=80%",
        "--picture", "none", "--json", "-o", str(out),
    )  # fmt: skip
    found = json.loads(told)
    assert found["after"]["parameters"] <= 0.8 * found["before"]["parameters"]
    assert not found["standard"]
    assert found["files"] == [str(out / "model.pt2")]
    program = torch.export.load(out / "model.pt2").module()
    assert program(torch.randn(5, 3, 10, 10)).shape == (5, 4)
    assert not (out / "compress.png").exists()


REFUSED = {
    "no blocks": ("mine.py:no_blocks", "mine.py:batches", [], "has no stack of blocks"),
    "no data": ("mine.py:net", "mine.py:nothing", [], "--data mine.py:nothing is empty"),
    "no file": ("none.py:net", "mine.py:batches", [], "MODEL .*none.py:net: there is no file"),
    "no function": ("mine.py:nett", "mine.py:batches", [], "MODEL .*mine.py:nett: there is no function 'nett'"),
    "no function for data": ("mine.py:net", "mine.py:b", [], "--data .*mine.py:b: there is no function 'b'"),
    "no --data": ("mine.py:net", None, [], "--data is missing"),
    "wrong data": ("torchvision:resnet18", "nowhere", [], "there is no such folder, file or data set"),
    "no images": ("hf:vit", "vit", [], "there is no image in it"),
    "text without tokenizer": ("mine.py:net", "mine.py", [], "has no tokenizer"),
    "wrong budget": ("mine.py:net", "mine.py:batches", ["--budget", "speed"], "--budget speed can't be read"),
    "budget too small": (
        "mine.py:net", "mine.py:batches", ["--budget", "parameters<=1%"],
        r"Net can't meet parameters<=1%: with all",
    ),
    "too many blocks": ("mine.py:net", "mine.py:batches", ["--budget", "blocks=9"], "blocks=9: Net has 5 blocks"),
    "wrong heal": ("mine.py:net", "mine.py:batches", ["--heal", "soon"], "--heal soon: write a number of epochs"),
    "wrong form": ("mine.py:net", "mine.py:batches", ["--form", "half"], "--form half: write auto or one of"),
    "wrong format": ("mine.py:net", "mine.py:batches", ["--format", "zip"], "--format zip: write some of"),
    "no weights": ("resnet20", "mine.py:batches", [], "--pretrained is missing"),
    "no such weights": ("torchvision:resnet18", "mine.py:batches", ["--pretrained", "w.pt"], "There is no file"),
    "no model": ("resnet9000", "mine.py:batches", [], "There is no model 'resnet9000'"),
    "not standard": (
        "mine.py:net", "mine.py:batches", ["--format", "standard", "--picture", "none"],
        "--format standard: .* is of no library",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["hf:some/model", "timm:resnet18", "torchvision:resnet18"])
def test_without_a_network_published_weights_are_refused_and_nothing_is_written(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm
    import torchvision
    import transformers

    def unreachable(*given: Any, **more: Any) -> None:
        if more.get("pretrained", True):
            raise OSError("We couldn't connect to 'the hub' to load the files.")

    built = timm.create_model
    for owner, function in (
        (transformers.AutoConfig, "from_pretrained"),
        (torchvision.models._api.WeightsEnum, "get_state_dict"),
    ):
        monkeypatch.setattr(owner, function, unreachable)
    monkeypatch.setattr(timm, "create_model", lambda *a, **m: unreachable(**m) or built(*a, **m))
    out = place / "unreached"
    error = call(name, "--data", f"{place / 'mine.py'}:batches", "--budget", "blocks=1", "-o", str(out), code=2)
    assert f"MODEL {name}" in error
    assert "couldn't connect" in error
    assert ("write hf:FOLDER" if name.startswith("hf:") else "Add --pretrained FILE") in error
    assert not out.exists()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_told_in_one_line(case: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.chdir(place)
    model, data, flags, said = REFUSED[case]
    given = [] if data is None else ["--data", data]
    budget = [] if "--budget" in flags else ["--budget", "blocks=1"]
    told = call(model, *given, *budget, *flags, "-o", "refused", code=2)
    lines = [line for line in re.split(r"[\r\n]+", told) if line.startswith("replearn: ")]
    assert len(lines) == 1, told  # other libraries may print progress there
    assert "Traceback" not in told
    assert re.search(said, lines[0]), told
