"""compress on transformers: half blocks, linear maps, blocks of every library; and least squares from moments."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from replearn.compression import compress, recognise
from replearn.compression.regression_rows import layer_rows, weight_matrix
from replearn.models.transformer_lm import TransformerLM
from replearn.operators._base.ridge import Moments, solve
from tests.zoo import ZOO


def texts(number: int, seed: int) -> Tensor:
    """Sequences in which every word follows from the two before it."""
    words = torch.randint(0, 11, (number, 2), generator=torch.Generator().manual_seed(seed))
    for _ in range(14):
        words = torch.cat([words, (words[:, -1:] * 3 + words[:, -2:-1] + 1) % 11], 1)
    return words


@cache
def trained() -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(11, dim=32, depth=6, num_heads=2, hidden=64, max_length=16, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(150):
        words = texts(32, step)
        optimizer.zero_grad()
        F.cross_entropy(model(words)[:, 1:-1].flatten(0, 1), words[:, 2:].flatten()).backward()
        optimizer.step()
    return model.eval()


def batches() -> list[Tensor]:
    return [texts(32, 1000 + i) for i in range(4)]


def test_transformer_blocks_are_recognised() -> None:
    found = recognise(trained(), batches())
    assert {block.structure.kind for block in found.blocks} == {"transformer"}


@pytest.mark.parametrize("form", ["removal", "low-rank", "full", "mlp", "attention"])
def test_every_form_is_better_than_bare_removal(form: Any) -> None:
    small = compress(trained(), batches(), budget=["blocks.2", "blocks.4"], form=form)
    assert [fit.form for fit in small.fitted.blocks] == [form, form]
    assert small.agreement.divergence < small.removal.divergence
    assert small.model(batches()[0]).shape == (32, 16, 11)


@pytest.mark.parametrize("gap", [["blocks.2"], ["blocks.2", "blocks.3"]])
def test_the_layer_before_a_gap_takes_over_at_no_cost(gap: list[str]) -> None:
    small = compress(trained(), batches(), budget=gap, form="removal")
    first = small.fitted.layers[0]
    assert (first.name, first.touched) == ("blocks.1.down", True)
    assert first.after < first.before
    old, new = trained().blocks[1].state_dict(), small.model.blocks[1].state_dict()
    assert {key for key in old if not torch.equal(old[key], new[key])} <= {"down.weight", "down.bias"}


class SizedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor, height: int) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out.view(len(x), height, -1, 16).flatten(1, 2)


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = SizedMlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x), 2)


@pytest.mark.parametrize("form", ["mlp", "attention"])
def test_an_mlp_that_takes_more_than_its_input(form: Any) -> None:
    model = nn.Sequential(*(Sized() for _ in range(4)), nn.Linear(16, 5)).eval()
    small = compress(model, [torch.randn(8, 6, 16) for _ in range(4)], budget=["1"], form=form)
    assert small.agreement.divergence < small.removal.divergence


def test_a_gap_behind_another_norm_is_not_taken_over() -> None:
    """The untouched sum behind the gap is normed by weights that go with the gap."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval()
    data = [torch.randn(8, 6, 16) for _ in range(3)]
    small = compress(model, data, budget=["layers.2"], form="removal")
    assert not [fit.name for fit in small.fitted.layers if fit.name.startswith("layers.1.")]


def test_the_mlp_is_what_auto_keeps() -> None:
    small = compress(trained(), batches(), budget=["blocks.3"])
    assert small.fitted.blocks[0].form == "mlp"
    assert small.after.parameters == small.promised.parameters


KINDS = {
    "torchvision_basic": "basic",
    "torchvision_bottleneck": "bottleneck",
    "timm_resnet": "basic",
    "timm_vit": "transformer",
    "hf_vit": "transformer",
    "hf_bert": "transformer",
    "hf_llama": "transformer",
    "hf_gpt2": "transformer",
    "encoder_pre_norm": "transformer",
    "encoder_post_norm": "transformer",
    "swin": "transformer",
    "convnext": "any",
    "sequential": "any",
}


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_other_libraries_are_recognised_and_can_go(name: str) -> None:
    model = ZOO[name].fresh()
    before = copy.deepcopy(model.state_dict())
    data = [ZOO[name].batch() for _ in range(3)]
    found = recognise(model, data)
    assert KINDS[name] in {block.structure.kind for block in found.blocks}
    for form, gone in (("auto", found.candidates[0]), ("channels", found.candidates[-1])):
        small = compress(model, data, budget=[gone], form=form)
        assert small.agreement.divergence < 1
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_scale_behind_a_layer_is_read_in_the_layers_layout() -> None:
    """torchvision's ConvNeXt scales channels behind the permutation, timm's before it."""
    blocks = [torchvision.models.convnext.CNBlockConfig(8, None, 4)]
    model = torchvision.models.ConvNeXt(blocks, layer_scale=0.5, num_classes=4).eval()
    data = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    small = compress(model, data, budget=["features.1.1"], form="removal")
    realigned = [layer for layer in small.fitted.layers if layer.touched]
    assert any(layer.name.startswith("features.1.2.block") for layer in realigned)
    assert small.agreement.divergence <= small.removal.divergence


def repadded() -> nn.Module:
    """A convolution that was dilated after it was built, as segmentation-models-pytorch does."""
    layer = nn.Conv2d(4, 6, 3, padding=1)
    layer.dilation = layer.padding = (2, 2)
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        repadded(),
        nn.Conv2d(4, 6, (3, 2), padding="same", dilation=2),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, (1, 3), padding=(0, 2), dilation=(1, 2), groups=2),
        nn.Conv2d(4, 6, 1, padding=1),
        nn.Conv1d(4, 6, 3, padding="same"),
    ],
)
def test_rows_times_matrix_is_the_layer(layer: nn.Module) -> None:
    shape = {"Linear": (5, 3, 6), "Conv1d": (5, 4, 7), "Conv2d": (5, 4, 7, 9)}[type(layer).__name__]
    x = torch.randn(shape)
    y = layer(x).detach()
    bias = layer.get_parameter("bias").detach()
    for patches, wanted in layer_rows(layer, x, y):
        made = patches.double() @ weight_matrix(layer).mT + bias.view(patches.shape[0], 1, -1)
        torch.testing.assert_close(made.float(), wanted, rtol=1e-4, atol=1e-5)


def test_solving_finds_the_map_and_ridge_pulls_to_the_base() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 400, 5), torch.randn(1, 3, 5)
    y = x @ weight.mT + 2
    fitted, held = Moments(), Moments()
    fitted.add(x[:, :300], y[:, :300])
    held.add(x[:, 300:], y[:, 300:])
    zero = torch.zeros(1, 3, 5, dtype=torch.float64)
    found = solve(fitted, held, zero, ridges=(1e-9,))
    torch.testing.assert_close(found.weight.float(), weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.shift, torch.full((1, 3), 2.0, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    assert found.error < 1e-6
    pulled = solve(fitted, held, zero, ridges=(1e9,))
    assert float(pulled.weight.abs().max()) < 1e-6
    low = solve(fitted, held, zero, rank=1, ridges=(1e-9,))
    assert int(torch.linalg.matrix_rank(low.weight[0])) == 1


@pytest.mark.parametrize(("number", "narrow"), [(300, 512), (30, 8)])
def test_inputs_that_hardly_vary_are_solved_within_rounding(number: int, narrow: int) -> None:
    """The mean leaves sums of float32 products less than they are rounded by."""
    torch.manual_seed(0)
    x, y = 5 + 1e-5 * torch.randn(1, number + 20, 64), torch.randn(1, number + 20, 3)
    fitted, held = Moments(narrow=narrow), Moments(narrow=narrow)
    fitted.add(x[:, :number], y[:, :number])
    held.add(x[:, number:], y[:, number:])
    found = solve(fitted, held, torch.zeros(1, 3, 64, dtype=torch.float64))
    rest = x[:, number:].double() @ found.weight.mT + found.shift[:, None] - y[:, number:]
    assert found.error == pytest.approx(float(rest.square().sum(-1).mean()), rel=0.05)
    assert found.error < 4


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("shifted", [True, False])
def test_fewer_rows_than_columns_are_solved_from_rows_alike(rank: int | None, shifted: bool) -> None:
    torch.manual_seed(0)
    x, y, base = torch.randn(2, 24, 40) + 1, torch.randn(2, 24, 6), torch.randn(2, 6, 40).double() / 9
    found = []
    for narrow in (512, 8):
        fitted, held = Moments(narrow=narrow), Moments(narrow=narrow)
        for part in (slice(0, 10), slice(10, 20)):
            fitted.add(x[:, part], y[:, part])
        held.add(x[:, 20:], y[:, 20:])
        assert (fitted.rows is not None) == (narrow == 8)
        found.append((solve(fitted, held, base, shifted=shifted, rank=rank, ridges=(1e-2,)), fitted))
    (one, sums), (two, kept) = found
    torch.testing.assert_close(one.weight, two.weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(one.shift, two.shift, rtol=1e-3, atol=1e-4)
    assert one.error == pytest.approx(two.error, rel=1e-3)
    torch.testing.assert_close(
        sums.output_statistics(one.weight), kept.output_statistics(one.weight), rtol=1e-3, atol=1e-4
    )


def test_wide_layers_are_realigned_on_a_part_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compress(trained(), batches(), budget=["blocks.2"], form="removal")
    monkeypatch.setattr("replearn.compression.regression_rows.WORK", 2e5)
    part = compress(trained(), batches(), budget=["blocks.2"], form="removal")
    assert not whole.notes
    assert "wide layers were realigned on a part of every sample's positions" in part.notes[0]
    assert part.agreement.divergence < part.removal.divergence


def test_a_bottlenecks_map_is_smaller_than_the_bottleneck() -> None:
    model, data = ZOO["torchvision_bottleneck"].fresh(), [ZOO["torchvision_bottleneck"].batch() for _ in range(3)]
    found = recognise(model, data)
    name = next(b.name for b in found.blocks if not b.kept and b.structure.kind == "bottleneck")
    small = compress(model, data, budget=[name])
    assert small.fitted.blocks[0].form in ("low-rank", "removal")
    assert small.after.parameters < small.before.parameters
