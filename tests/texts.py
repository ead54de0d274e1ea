"""A tiny text in WikiText-2's layout, and what the reader is told to expect of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from replearn.experiments.training import data
from replearn.experiments.training.data.text import basic_english

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "run", "far", "away"]


def sentences(num: int, seed: int) -> str:
    """Lines whose words follow each other by a rule, so that there is something to learn; some are empty."""
    chance = random.Random(seed)
    lines = []
    for number in range(num):
        start = chance.randrange(len(WORDS))
        words = [WORDS[(start + 5 * step) % len(WORDS)] for step in range(chance.randrange(3, 12))]
        lines.append(f" {' '.join(words)} . " if number % 5 else "")
    return "".join(f"{line}\n" for line in lines)


def write_text(root: Path, num: int = 300) -> Path:
    folder = root / "wikitext-2"
    folder.mkdir(parents=True)
    for seed, (split, share) in enumerate((("train", num), ("test", 60))):
        (folder / f"{split}.txt").write_text(sentences(share, seed), encoding="utf-8")
    return folder


@pytest.fixture
def text_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with a whole tiny WikiText-2."""
    folder = write_text(tmp_path / "data")
    texts = [(folder / f"{split}.txt").read_text(encoding="utf-8").split("\n")[:-1] for split in ("train", "test")]
    train, test = (sum(len(basic_english(line)) + 1 for line in lines) for lines in texts)
    whole = replace(data.source_named("wikitext2"), num_train=train, num_test=test)
    monkeypatch.setitem(data._sources(), "wikitext2", whole)
    return tmp_path / "data"
