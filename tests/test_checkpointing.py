"""The sixth law under activation checkpointing: blocks and operators that run twice give the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import Bottleneck, Own
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import ZOO

import replearn
from replearn import operators
from replearn.blocks.running import call
from replearn.models.cifar_resnet import BasicBlock
from replearn.operators._base.options import Options, ReadingOptions

KINDS = {
    "basic": (lambda: BasicBlock(4, 4, 1), (2, 4, 6, 6)),
    "bottleneck": (lambda: Bottleneck(8), (2, 8, 6, 6)),
    # with dropout: the second run must draw what the first drew
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True), (2, 5, 8)),
    "any": (lambda: Own(8), (2, 8)),
}


def subject(kind: str, options: Options) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    block, shape = KINDS[kind]
    model = nn.Sequential(*(block() for _ in range(5)))
    replearn.replace_(model, replearn.plan(model, interval=2, operator=options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(shape, requires_grad=True)


def every_operator() -> Iterator[Any]:
    for name, options in operators.available().items():
        for kind in options.kinds:
            yield pytest.param(kind, options(), id=f"{name}-{kind}")
            if issubclass(options, ReadingOptions):
                rest: Any = {"stop_gradient": False, "correction": "low-rank", "rank": 1}
                yield pytest.param(kind, options(**rest), id=f"{name}-{kind}-all_options")


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    output.float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("around", ["every block", "operators", "segments"])
@pytest.mark.parametrize(("kind", "options"), list(every_operator()))
def test_checkpointed_gradients_are_the_plain_ones(kind: str, options: Options, around: str) -> None:
    model, x = subject(kind, options)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = gradients(model, model(x))
    torch.manual_seed(1)
    y = x
    if around == "segments":  # an operator and its sources are recomputed in one go, or apart
        y = checkpoint_sequential(twin, 2, y, use_reentrant=False)
    else:
        for index, block in enumerate(twin):
            wrapped = around == "every block" or index % 2
            y = checkpoint(block, y, use_reentrant=False) if wrapped else block(y)
    found = gradients(twin, y)
    assert expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [operators.WholeBlock(stop_gradient=False), operators.Projection()], ids=str)
def test_hugging_face_checkpointing_gives_the_plain_gradients(options: Options) -> None:
    model, batch = ZOO["hf_llama"].replaced(options).train(), ZOO["hf_llama"].batch()
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    expected = gradients(model, call(model, batch).logits)
    found = gradients(twin, call(twin, batch).logits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
