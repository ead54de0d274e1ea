"""WikiText-2 (Merity, Xiong, Bradbury, Socher 2016): good and featured articles of Wikipedia, two million words.

Text files, a paragraph a line, words apart and rare ones written <unk>; CC BY-SA. Its home is gone, so nothing is
downloaded. The validation text is not read. The official counts are words and line ends before our own cutting.
Read as the paper does: basic English words, those seen at least twice, <eos> after each line, empty ones too.
"""

from .....errors import ReplearnError
from ..source import Root, Source, locate
from ..text import TextSet, read_lines, text_set

TOKENS = {"train": 2_088_628, "test": 245_569}
NAMES = ("{}.txt", "wiki.{}.tokens")  # plain, and as the release calls them


def load_wikitext2(source: Source, root: Root = None, strict_counts: bool = True, min_count: int = 2) -> TextSet:
    folder = locate(source, root)
    name = next(name for name in NAMES if (folder / name.format("train")).exists())
    lines = {}
    for split, count in TOKENS.items():
        path = folder / name.format(split)
        try:
            lines[split] = read_lines(path)
        except ReplearnError as error:
            raise ReplearnError(f"{error} {source.how}") from error
        held = sum(len(line.split()) + 1 for line in lines[split])
        if strict_counts and held != count:
            raise ReplearnError(
                f"{path} holds {held:,} words and line ends, and {count:,} are expected: it is cut off or "
                f"altered. {source.how}"
            )
    return text_set(source.name, lines["train"], lines["test"], min_count)


WIKITEXT2 = Source(
    name="wikitext2",
    load=load_wikitext2,
    title="WikiText-2",
    num_train=TOKENS["train"],
    num_test=TOKENS["test"],
    folders=("wikitext-2",),
    signs=tuple(name.format("train") for name in NAMES),
    how="Put train.txt and test.txt (or the release's wiki.*.tokens) into ROOT/wikitext-2.",
)
