"""A text as a data set: read it, cut it into basic English words, number them."""

import codecs
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ReplearnError
from .source import Counted

UNKNOWN, END = "<unk>", "<eos>"


@dataclass(frozen=True, eq=False, kw_only=True)
class TextSet(Counted):
    """A text whose words are numbers: one long int64 stream for each part.

    The words are those of the training text; every other word of the other parts is `<unk>`.
    """

    name: str
    words: tuple[str, ...] = field(repr=False)  # by number; <unk> is 0, <eos> is 1
    train: Tensor = field(repr=False)
    test: Tensor = field(repr=False)

    unit = "tokens"  # what is counted, and what the classes are
    classes = "words"

    @property
    def num_classes(self) -> int:
        return len(self.words)


def basic_english(line: str) -> list[str]:
    """The words of a line, as torchtext's `basic_english` cuts them.

    >>> basic_english('The dog\\'s bark ( "loud" ) , said <unk> : hush !')
    ['the', 'dog', "'", 's', 'bark', '(', 'loud', ')', ',', 'said', '<unk>', 'hush', '!']
    """
    line = line.lower().replace('"', "")
    return re.sub(r"<br />|[;:]", " ", re.sub(r"([.,()!?'])", r" \1 ", line)).split()


def read_lines(path: Path) -> list[str]:
    """The lines of a text file; ReplearnError where it is not UTF-8 or has no words."""
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # else it would be a part of the first word
        text = raw.decode("utf-8")
    except OSError as error:
        raise ReplearnError(f"Can't read {path}: {error}.") from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        likely = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
        raise ReplearnError(
            f"{path} is not UTF-8: line {line} holds the byte 0x{raw[error.start]:02x}. Convert it first, as "
            f"`iconv -f {likely} -t utf-8 {path.name}`."
        ) from error
    if not text.strip():
        raise ReplearnError(f"{path} is empty: there is not one word in it. Use another copy.")
    lines = text.split("\n")  # not splitlines(), which knows line ends inside of lines
    return lines[:-1] if not lines[-1] else lines


def text_set(name: str, train: Sequence[str], test: Sequence[str], min_count: int = 2) -> TextSet:
    """Lines as numbered words, `<eos>` after each line; words seen less than `min_count` times are `<unk>`."""
    cut = [list(map(basic_english, lines)) for lines in (train, test)]
    counts = Counter(word for line in cut[0] for word in line)
    kept = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
    if not kept:
        raise ReplearnError(
            f"No word is left of {name}: of the {len(counts):,} in its training text none is seen {min_count:,} "
            "times, which text.min_count asks for. Write a smaller one, or use another text."
        )
    words = tuple(dict.fromkeys([UNKNOWN, END, *kept]))
    numbers = {word: number for number, word in enumerate(words)}

    def stream(lines: list[list[str]]) -> Tensor:
        ended = ((*line, END) for line in lines)
        return torch.tensor([numbers.get(word, 0) for line in ended for word in line], dtype=torch.int64)

    return TextSet(name=name, words=words, train=stream(cut[0]), test=stream(cut[1]))
