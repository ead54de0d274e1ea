"""Compress where the model does not fit on the device, or the activations in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import replearn
from replearn.errors import ReplearnError
from replearn.models import CifarResNet

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "compress"))


def network() -> CifarResNet:
    torch.manual_seed(0)
    return CifarResNet(20, width=8).eval()


def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(8, 3, 16, 16, generator=random) for _ in range(4)]


@pytest.mark.parametrize("form", ["removal", "full", "low-rank"])
def test_streaming_gives_the_same_model_and_leaves_the_given_one(form: Any, tmp_path: Path) -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = ["layer1.1", "layer2.1", "layer3.1"]
    plain = replearn.compress(model, batches(), budget=names, form=form)
    streamed = replearn.compress(model, batches(), budget=names, form=form, device="cpu:0", offload=tmp_path)
    assert not any(tmp_path.iterdir())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for one, other in zip(plain.model.parameters(), streamed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert plain.resident == 0
    assert 0 < streamed.resident < 0.8 * sum(t.nbytes for t in model.state_dict().values())


def test_healing_and_choosing_work_with_a_device() -> None:
    model = network()
    small = replearn.compress(model, batches(), budget="blocks=2", device="cpu:0", heal=1)
    assert len(small.removed) == 2
    assert small.healing is not None
    assert small.healing.after <= small.healing.before


def test_an_endless_loader_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    read = []

    def endless() -> Iterator[Tensor]:
        while True:
            read.append(len(read))
            yield torch.randn(8, 3, 32, 32)

    small = replearn.compress(network(), endless(), budget=["layer1.1"], samples=20, offload=tmp_path)
    assert small.num_samples == 20
    assert len(read) == 3


def test_a_llama_comes_to_the_device_block_by_block() -> None:
    pytest.importorskip("transformers")
    from scale import main

    found = main(["--small", "--batches", "6", "--batch", "4", "--length", "16"])
    assert found["out"] == 2
    assert found["peak_of_weights"] < 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device": "nowhere"}, "device='nowhere' can't be used here"),
        ({"offload": "no/such/folder"}, "offload='no/such/folder' is no folder"),
    ],
)
def test_errors_teach(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ReplearnError, match=says):
        replearn.compress(network(), batches(), budget="blocks=1", **settings)
