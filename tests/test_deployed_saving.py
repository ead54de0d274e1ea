"""save_pretrained of a deployed Hugging Face model: refused where it would load as another model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import ZOO

import replearn
from replearn import ReplearnError, operators


@pytest.mark.parametrize("name", ["hf_llama", "hf_bert", "hf_vit"])
def test_a_deployed_model_with_other_layers_is_not_written_and_the_error_says_what_to_do(
    name: str, tmp_path: Path
) -> None:
    plain: Any = replearn.deploy(ZOO[name].replaced())
    for model in (plain, copy.deepcopy(plain)):
        with pytest.raises(
            ReplearnError, match=r"loads as another model: \S+ is not as .* export it as pt2 or ONNX"
        ):
            model.save_pretrained(tmp_path / "out")
    again = pickle.loads(pickle.dumps(plain))  # without this package the text is all that is left
    with pytest.raises(TypeError):
        again.save_pretrained(tmp_path / "out")
    assert "loads as another model" in again.save_pretrained
    assert not (tmp_path / "out").exists()


def test_a_deployed_model_whose_layers_are_all_standard_is_written_and_loads_equal(tmp_path: Path) -> None:
    entry = ZOO["hf_llama"]
    plain: Any = replearn.deploy(entry.replaced(operators.available()["whole_block"]()))
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**entry.batch()).logits, plain(**entry.batch()).logits)
