"""compress and calibrate_ on padded batches: what an attention_mask leaves out counts nowhere."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replearn
from replearn.compression import compress
from replearn.fitting.observe import tokens_of
from tests.test_compress_ship import hugging_face


class Reader(nn.Module):
    """torch's own layers, whose attention works on (tokens, batch, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.steps = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(5))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        for step in self.steps:
            x = step(x, src_key_padding_mask=attention_mask == 0)
        out: Tensor = self.head(x)
        return out


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Reader().eval() if kind == "reader" else hugging_face(kind)


def padded(texts: list[Tensor], side: str, pad: int) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(texts, True, -1, side)
    mask = (ids >= 0).long()
    found = {"input_ids": ids.where(mask > 0, pad), "attention_mask": mask}
    return found | ({"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if side == "left" else {})


def batches(side: str, pad: int = 0, alone: bool = False) -> list[dict[str, Tensor]]:
    """Ten batches of four texts, the first without padding; or the same texts alone, the same ones held out."""
    draws = torch.Generator().manual_seed(1)
    sizes = [3] * 4 + torch.randint(3, 13, (36,), generator=draws).tolist()
    texts = [torch.randint(1, 39, (size,), generator=draws) for size in sizes]
    groups = [texts[i : i + 4] for i in range(0, 40, 4)]
    if not alone:
        return [padded(group, side, pad) for group in groups]
    held, rest = (
        iter([t for i, g in enumerate(groups) if (i % 5 == 1) is out for t in g]) for out in (True, False)
    )
    return [padded([t], side, pad) for _ in range(8) for t in (next(rest), next(held), *islice(rest, 3))]


CASES = (
    "classifier right removal, classifier right low-rank, gpt2 left mlp, gpt2 right full, llama left removal, "
    "llama right channels, reader right attention"
)


@pytest.mark.parametrize(("kind", "side", "form"), [case.split() for case in CASES.split(", ")])
def test_padding_counts_nowhere(kind: str, side: str, form: Any) -> None:
    model = made(kind)
    given = [batches(side), batches(side, pad=39), batches(side, alone=True)]
    small, other, alone = (compress(model, data, budget="blocks=2", form=form) for data in given)
    for name, value in small.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(value, alone.model.state_dict()[name], rtol=1e-3, atol=1e-3)
    for found in (other, alone):
        assert found.removed == small.removed
        assert found.agreement.same == small.agreement.same
        assert found.agreement.divergence == pytest.approx(small.agreement.divergence, rel=1e-3)
        assert found.removal.divergence == pytest.approx(small.removal.divergence, rel=1e-3)


@pytest.mark.parametrize(("kind", "gone"), [("gpt2", "transformer.h.2"), ("llama", "model.layers.2")])
def test_padding_counts_not_in_healing(kind: str, gone: str) -> None:
    small, other = (compress(made(kind), batches("right", pad), budget=[gone], heal=3) for pad in (0, 39))
    assert small.healing is not None
    assert other.healing is not None
    assert small.healing.after < small.healing.before
    assert small.healing.after == pytest.approx(other.healing.after, rel=1e-3)


def test_what_a_mask_says() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert tokens_of({"attention_mask": mask}).tolist() == [[True, True, False], [True] * 3]  # type: ignore[union-attr]
    for other in (mask[:, :2], mask[None], -mask, None):
        assert tokens_of({"attention_mask": other}) is None
    assert tokens_of({"attention_mask": mask, "decoder_input_ids": mask}) is None
    assert tokens_of(mask) is None


def test_padding_counts_not_in_calibration() -> None:
    fits = []
    for pad in (0, 39):
        model = made("llama")
        fits.append(replearn.calibrate_(model, replearn.plan(model, 3), batches("right", pad)).fits[0])
    assert fits[0].error < fits[0].removal_error
    assert (fits[0].error, fits[0].removal_error) == pytest.approx(
        (fits[1].error, fits[1].removal_error), rel=1e-5
    )


def test_labels_of_an_encoder_decoder_are_what_its_decoder_is_given() -> None:
    model: Any = hugging_face("t5")
    data = [{**batch, "labels": batch["input_ids"]} for batch in batches("right")]
    small = compress(model, data, budget=["encoder.block.1"], form="removal")
    shifted = model.prepare_decoder_input_ids_from_labels(small.example["input_ids"])
    assert torch.equal(small.example["decoder_input_ids"], shifted)
