"""compress meets a latency by what is measured, and keeps what a model's own code reads of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replearn
from replearn.compression import compress, measure, recognise
from replearn.compression.fit import fit_
from replearn.compression.measure import timed
from tests.test_compress import Residual, digits, loader, trained
from tests.test_compress_ship import other


def clock(block: float, replacement: float, promised: float) -> Any:
    """A stand-in for timing: a model takes 1 and so much for each block and stand-in; a block alone `promised`."""

    def timed(calls: Sequence[Any], model: nn.Module, repeats: int, offloader: Any = None) -> list[float]:
        def seconds(call: Any) -> float:
            if not isinstance(call, partial):
                return promised
            body = call.args[0].body
            kept = sum(isinstance(module, Residual) for module in body)
            out = sum(not isinstance(module, (Residual, nn.Identity)) for module in body)
            return 1 + block * kept + replacement * out

        return [seconds(call) for call in calls]

    return timed


def test_latency_is_met_by_measurement_where_the_promise_is_too_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "timed", clock(block=0.05, replacement=0.0, promised=0.2))
    small = compress(trained(), loader(), budget="latency<=90%", form="removal")
    assert len(small.removed) == 3  # 1.15 of 1.30; the promise would have been content with one
    assert small.after.latency <= 0.9 * small.before.latency
    assert small.promised.latency < small.after.latency
    with pytest.raises(replearn.ReplearnError, match="with all 6 blocks out that can go, 77% is left"):
        compress(trained(), loader(), budget="latency<=50%", form="removal")


def test_no_more_blocks_go_than_the_measurement_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "timed", clock(block=0.2, replacement=0.0, promised=0.05))
    small = compress(trained(), loader(), budget="latency<=80%", form="removal")
    assert len(small.removed) == 3  # 1.6 of 2.2


def test_auto_takes_fewer_blocks_without_stand_ins_where_they_keep_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "timed", clock(block=0.1, replacement=0.3, promised=0.1))
    auto = compress(trained(), loader(), budget="latency<=95%")
    full = compress(trained(), loader(), budget="latency<=95%", form="full")
    assert {fit.form for fit in auto.fitted.blocks} == {"removal"}
    assert len(auto.removed) == 1 < len(full.removed)
    assert auto.agreement.divergence < full.agreement.divergence


def test_timing_goes_in_rounds_until_it_is_settled() -> None:
    ran: list[str] = []
    times = timed([lambda: ran.append("a"), lambda: ran.append("b")], nn.Identity(), 4)
    assert len(times) == 2
    assert ran[2:6] == ["a", "b", "b", "a"]
    assert 2 + 8 <= len(ran) <= 2 + 24


def test_packed_attention_is_read_alike_in_batches_of_one_and_of_more() -> None:
    model = other("torchvision_vit")
    data = [torch.randn(3, 3, 16, 16) for _ in range(4)]  # two for fitting and one held out, four times
    small = compress(model, data, budget="blocks=2", form="removal")
    assert len(small.removed) == 2
    found = recognise(model, data)
    same = fit_(other("torchvision_vit"), model, {}, replearn.compression.batches.read(data), found.order.blocks)
    assert {layer.name.rpartition(".")[2] for layer in same.layers} >= {"out_proj"}
    assert all(layer.before < 1e-6 for layer in same.layers)  # an untouched model gives what is aimed at


class Encoder(nn.Module):
    """nn.TransformerEncoder reads `self_attn` of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


def test_a_block_that_the_models_code_reads_stays() -> None:
    model = Encoder().eval()
    found = recognise(model, [torch.randn(20, 5, 16)])
    assert found.candidates == ("encoder.layers.1", "encoder.layers.2", "encoder.layers.3")
    assert "the model's code reads its self_attn" in str(found)
    assert len(compress(model, [torch.randn(20, 5, 16)], budget="blocks=3").removed) == 3
    with pytest.raises(replearn.ReplearnError, match=r"layers\.0 can't go: the model's code reads its self_attn"):
        compress(model, [torch.randn(20, 5, 16)], budget=["encoder.layers.0"])


class Numbered(nn.Module):
    """Its code reads a plain attribute of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Residual(1) for _ in range(4))
        for number, block in enumerate(self.body):
            block.gain = 1.0 + number

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = block(x) * block.gain
        return x.mean((2, 3))


def test_plain_attributes_of_blocks_are_passed_on() -> None:
    small = compress(Numbered().eval(), [digits()[0][:20]], budget=["body.0", "body.2"], form="removal")
    assert small.model.body[2].gain == 3.0
