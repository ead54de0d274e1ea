"""Models by their names on the Hugging Face hub: found, fetched and loaded with their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("httpx2")  # what huggingface_hub asks with
pytest.importorskip("timm")
pytest.importorskip("transformers")

import httpx2
import huggingface_hub
import timm
import transformers
from command_line import shown
from huggingface_hub.utils._http import default_client_factory
from safetensors.torch import save_file

from replearn.cli.compress_model import subject_of


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a hub that answers as the real one does, without a network."""
    commit = "0" * 40

    def answer(request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.strip("/")
        if path.startswith("api/models/"):
            return httpx2.Response(200, json={"id": "/".join(path.split("/")[2:4]), "sha": commit})
        name, _, rest = path.partition("/resolve/")
        file = tmp_path / "hub" / name / rest.partition("/")[2]
        if not file.is_file():
            return httpx2.Response(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        tag = hashlib.sha256(file.read_bytes()).hexdigest()
        return httpx2.Response(
            200, content=file.read_bytes(), headers={"ETag": f'"{tag}"', "X-Repo-Commit": commit}
        )

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(answer)))
    yield tmp_path / "hub"
    huggingface_hub.set_client_factory(default_client_factory)


def fetched(name: str) -> nn.Module:
    return subject_of(name, None, 32, torch.device("cpu"), None).model


def assert_equal(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_a_name_of_transformers_is_planned_and_fetched_with_its_weights(hub: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**shape, image_size=32, patch_size=16))
    model.save_pretrained(hub / "some" / "vit")
    assert "ViTForImageClassification: 1 of 5 blocks replaced" in shown("plan", "hf:some/vit")
    assert_equal(fetched("hf:some/vit").state_dict(), model.state_dict())


def test_a_name_of_timm_is_fetched_with_its_weights(hub: Path) -> None:
    model = timm.create_model("test_resnet")
    folder = hub / model.pretrained_cfg["hf_hub_id"]
    if "." not in folder.name:
        folder = folder.with_name(f"{folder.name}.{model.pretrained_cfg['tag']}")
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    assert_equal(fetched("timm:test_resnet").state_dict(), model.state_dict())
