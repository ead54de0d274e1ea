"""The sixth law under activation checkpointing: blocks and operators that run twice give the same gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from stacks import OPEN, every_operator, stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import ZOO

from replearn import operators
from replearn.blocks.running import call
from replearn.operators._base.options import Options


def layer_with_dropout() -> nn.Module:
    """Its second run must draw what the first drew."""
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    output.float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("around", ["every block", "operators", "segments"])
@pytest.mark.parametrize(("kind", "options"), list(every_operator(all_options=OPEN)))
def test_checkpointed_gradients_are_the_plain_ones(kind: str, options: Options, around: str) -> None:
    model, x = stack(kind, options, 5, transformer=layer_with_dropout)
    x.requires_grad_()
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
