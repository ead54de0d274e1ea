"""INT8 after deploy: outputs stay close, sizes stay free, and bad calibration data is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ZOO

import replearn
from replearn import ReplearnError

pytest.importorskip("torchao")

from replearn.deployment.quantizing import quantize, quantize_dynamic, quantize_static


def deployed(name: str) -> tuple[nn.Module, Any]:
    return replearn.deploy(ZOO[name].replaced()), ZOO[name].batch()


@torch.no_grad()
def test_a_cnn_is_quantized_with_calibration() -> None:
    plain, _ = deployed("cifar_resnet")
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    small, kind = quantize(plain, batches)
    assert "static" in kind
    expected, found = plain(batches[0]), small(batches[0])
    assert 0 < float((expected - found).abs().max() / expected.abs().max()) < 0.1
    assert small(torch.randn(3, 3, 8, 8)).shape == (3, 4)


@torch.no_grad()
def test_linear_layers_of_a_transformer_are_quantized() -> None:
    plain, x = deployed("timm_vit")
    small, kind = quantize(plain, [])
    assert "dynamic" in kind
    assert type(plain.blocks[0].attn.qkv.weight) is nn.Parameter  # the plain one is not touched
    assert type(small.blocks[0].attn.qkv.weight).__module__.startswith("torchao")
    expected, found = plain(x), small(x)
    assert 0 < float((expected - found).abs().max() / expected.abs().max()) < 0.1


def test_what_cannot_be_quantized_is_told() -> None:
    plain, x = deployed("cifar_resnet")
    for provoke, text in (
        (lambda: quantize_static(plain, []), "There is no calibration data"),
        (
            lambda: quantize_static(plain, [x[:, :2]]),
            r"can't be run on the calibration data, .* shape \(2, 8, 8\)",
        ),
        (
            lambda: quantize_static(plain, [x, x[..., :4]]),
            r"batch 1 holds inputs of shape \(3, 8, 4\), and the first",
        ),
        (lambda: quantize_static(plain, x), r"a list of batches, and this is one Tensor: write \[images\]"),
        (lambda: quantize_static(plain, [x, x / 0]), "batch 1 holds inf or NaN"),
        (lambda: quantize_static(copy.deepcopy(plain).double(), [x.double()]), r"weights in torch\.float64"),
        (lambda: quantize_static(plain, [(x, 0)]), r"Calibration batch 0 is no batch of inputs \(tuple\)"),
        (lambda: quantize_static(ZOO["cifar_resnet"].replaced(), [x]), "still has operators"),
        (lambda: quantize_dynamic(nn.Conv2d(3, 3, 1).eval()), "has no nn.Linear"),
        (lambda: quantize_dynamic(nn.Linear(3, 3)), "in train mode"),
        (
            lambda: quantize_dynamic(nn.Linear(3, 3, device="meta").eval()),
            "is on meta, and INT8 here is for a CPU",
        ),
        (
            lambda: quantize_dynamic(replearn.fast.streamline(nn.Linear(3, 3).eval(), dtype=torch.bfloat16)),
            "Quantize what deploy gives without dtype",
        ),
    ):
        with pytest.raises(ReplearnError, match=text):
            provoke()
