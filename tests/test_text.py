"""Texts as data: words, vocabularies, windows, and what a reader refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from texts import text_root, write_text  # noqa: F401

from replearn import ReplearnError
from replearn.experiments.training import data
from replearn.experiments.training.data import IGNORED
from replearn.experiments.training.data.text import basic_english, read_lines, text_set
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.text_batches import TextBatches

CPU = torch.device("cpu")


def small(length: int = 4, batch: int = 3, processes: Processes | None = None, num: int = 53) -> TextBatches:
    """Batches of a text whose words are 'w0', 'w1', ...: a word's place can be read off it."""
    lines = [" ".join(f"w{i}" for i in range(num))]
    made = text_set("counted", lines, lines, min_count=1)
    return TextBatches(made, processes or Processes(), batch, length)


def test_basic_english_cuts_as_torchtext_does() -> None:
    assert basic_english(" = Robert <unk> = ") == ["=", "robert", "<unk>", "="]
    assert basic_english("It's 1 @,@ 000 ; (really) ?!") == (
        ["it", "'", "s", "1", "@", ",", "@", "000", "(", "really", ")", "?", "!"]
    )
    assert basic_english('a "quoted" word: end.') == ["a", "quoted", "word", "end", "."]
    assert basic_english("   ") == []


def test_rare_and_unseen_words_are_unknown_and_every_line_ends() -> None:
    made = text_set("t", ["a b a", "", "b c"], ["a z c"])
    assert made.words == ("<unk>", "<eos>", "a", "b")
    assert made.train.tolist() == [2, 3, 2, 1, 1, 3, 0, 1]  # c was seen once
    assert made.test.tolist() == [2, 0, 0, 1]
    assert text_set("t", ["a b a", "b c"], ["c"], min_count=1).num_classes == 5


def test_wikitext2_is_read_from_both_layouts(text_root: Path) -> None:  # noqa: F811
    plain = data.load("wikitext2", text_root)
    assert isinstance(plain, data.TextSet)
    assert plain.num_classes == 2 + 13  # twelve words and the full stop
    assert plain.train.max() == plain.num_classes - 1
    folder = text_root / "wikitext-2"
    for split in ("train", "test"):
        (folder / f"{split}.txt").rename(folder / f"wiki.{split}.tokens")
    release = data.load("wikitext2", text_root)
    assert torch.equal(release.train, plain.train)
    status = data.status("wikitext2", text_root)
    assert (status.problem, status.data.unit, status.data.classes) == (None, "tokens", "words")


def test_a_broken_text_is_refused_with_its_name_and_the_reason(text_root: Path) -> None:  # noqa: F811
    path = text_root / "wikitext-2" / "test.txt"
    path.write_bytes(b"fine\nnot \xe9 fine\n")
    with pytest.raises(ReplearnError, match=r"test\.txt is not UTF-8: line 2 holds the byte 0xe9. Convert it"):
        data.load("wikitext2", text_root)
    path.write_text("two bytes a letter", encoding="utf-16")
    with pytest.raises(ReplearnError, match=r"line 1 holds the byte 0xff. Convert it first, as `iconv -f utf-16"):
        data.load("wikitext2", text_root)
    path.write_text(" \n\n")
    with pytest.raises(ReplearnError, match=r"test\.txt is empty: there is not one word in it"):
        data.load("wikitext2", text_root)
    path.write_text("one two\n")
    with pytest.raises(ReplearnError, match=r"holds 3 test tokens, and WikiText-2 has \d+: it is not whole"):
        data.load("wikitext2", text_root)
    assert data.load("wikitext2", text_root, strict_counts=False).test.numel() == 3
    path.unlink()
    with pytest.raises(ReplearnError, match=r"Can't read .*test\.txt: .*ROOT/wikitext-2"):
        data.load("wikitext2", text_root)
    with pytest.raises(ReplearnError, match="digits has no min_count, so it is no data set for this task"):
        data.load("digits", min_count=2)


def test_an_epoch_goes_through_the_text_once_in_windows_and_targets_are_the_next_words() -> None:
    batches = small()
    seen: list[int] = []
    batches.start_epoch(0, 0, 0)
    for step in range(batches.steps):
        batches.advance(step)
        words, targets = batches.current()
        assert words.shape == targets.shape == (3, 4)
        assert torch.equal(words[:, 1:], targets[:, :-1])
        seen += words.flatten().tolist()
    assert len(set(seen)) == len(seen) == 12 * 4  # no word twice
    first = batches.current()[0].clone()
    batches.start_epoch(0, 0, batches.steps - 1)
    batches.advance(batches.steps - 1)
    assert torch.equal(batches.current()[0], first)  # the same epoch is the same again
    assert not torch.equal(batches.starts(0, 0), batches.starts(0, 1))
    assert not torch.equal(batches.starts(0, 0), batches.starts(1, 0))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_word_of_the_test_is_predicted_once_over_all_processes(world: int) -> None:
    counts = []
    for rank in range(world):
        parts = small(batch=6, processes=Processes(rank, world)).test()
        counts += [target for _, targets in parts for target in targets.flatten().tolist() if target != IGNORED]
    stream = small().text.test.tolist()
    assert sorted(counts) == sorted(stream[1:])


def test_processes_share_a_batch_and_calibration_takes_training_windows() -> None:
    whole = small(batch=4)
    whole.start_epoch(3, 1, 0)
    whole.advance(0)
    parts = []
    for rank in range(2):
        share = small(batch=4, processes=Processes(rank, 2))
        share.start_epoch(3, 1, 0)
        share.advance(0)
        parts.append(share.current()[0])
    assert torch.equal(torch.cat(parts), whole.current()[0])
    assert [len(part) for part in small().calibration(0, 5)] == [5]
    assert small().calibration(0, 1000)[0].shape == (12, 4)


def test_windows_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ReplearnError, match=r"Sequences of 40 words can't be cut from counted, which has 54"):
        small(length=40)
    with pytest.raises(
        ReplearnError, match=r"A batch of 100 is larger than counted, which has 12 training sequences"
    ):
        small(batch=100)
    with pytest.raises(
        ReplearnError, match=r"No word is left of t: of the 2 in its training text none is seen 3 "
    ):
        text_set("t", ["a b a"], ["a"], min_count=3)
    short = text_set("t", ["a a a a"], [";"])
    with pytest.raises(
        ReplearnError, match=r"The test text of t has 1 word or line end, and no word to say after"
    ):
        TextBatches(short, Processes(), 1, 2)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_text("the cat\n", encoding="utf-8-sig")
    assert read_lines(tmp_path / "marked.txt") == ["the cat"]


def test_the_tiny_text_is_not_the_official_one(tmp_path: Path) -> None:
    write_text(tmp_path)
    with pytest.raises(ReplearnError, match="holds 2,170 training tokens, and WikiText-2 has 2,086,708"):
        data.load("wikitext2", tmp_path)
