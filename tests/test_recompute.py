"""`recompute=True`: the same training, with less kept for the backward pass."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision.models.resnet import Bottleneck as TorchvisionBottleneck

import replearn
from replearn import operators
from replearn.models.cifar_resnet import stage
from replearn.operators._base.options import ReadingOptions


def subject(options: ReadingOptions) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if "basic" in options.kinds:
        model: nn.Module = stage(8, 8, 4, stride=1)
        x = torch.randn(4, 8, 6, 6)
    elif "bottleneck" in options.kinds:
        model, x = nn.Sequential(*(TorchvisionBottleneck(16, 4) for _ in range(4))), torch.randn(4, 16, 6, 6)
    else:
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, dropout=0.0)
        model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(2, 5, 16)
    replearn.replace_(model, replearn.plan(model, 4, 2, operator=options))
    return model, x


EVERY = [options() for options in operators.available().values() if issubclass(options, ReadingOptions)]


@pytest.mark.parametrize("options", EVERY, ids=lambda options: options.name)
@pytest.mark.parametrize("together", [False, True])
def test_training_is_the_same_to_the_bit(options: ReadingOptions, together: bool) -> None:
    kept, x = subject(options)
    again, _ = subject(replace(options, recompute=True))
    again.load_state_dict(kept.state_dict())
    for model in (kept, again):
        if together:
            with replearn.fast.synthesized(model):
                loss = model(x).square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
    for (name, one), other in zip(kept.named_parameters(), again.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(kept.named_buffers(), again.buffers(), strict=True):
        assert torch.equal(one, other), name  # running statistics are updated once


def test_less_is_kept_for_the_backward_pass() -> None:
    def kept(model: nn.Module, x: Tensor) -> int:
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        return sum(found.values())

    plain, x = subject(operators.Basic())
    again, _ = subject(operators.Basic(recompute=True))
    assert kept(plain, x) - kept(again, x) >= x.numel() * 4  # what goes into the BatchNorm


def test_recompute_survives_copies_and_the_plans_json() -> None:
    model, x = subject(operators.Basic(recompute=True))
    clone = copy.deepcopy(model)
    clone(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    plan = replearn.plan(stage(8, 8, 4, stride=1), 4, 2, operator=operators.Basic(recompute=True))
    assert replearn.Plan.from_json(plan.to_json()) == plan
    old = plan.to_json().replace(', "recompute": true', "").replace('"recompute": true,', "")
    assert "recompute" not in old
    assert replearn.Plan.from_json(old).targets[0].operator == operators.Basic()


def test_recompute_is_true_or_false() -> None:
    with pytest.raises(replearn.ReplearnError, match="recompute is True or False, not 'yes'"):
        operators.Basic(recompute="yes")  # type: ignore[arg-type]
