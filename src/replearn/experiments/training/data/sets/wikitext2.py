"""WikiText-2 (Merity, Xiong, Bradbury, Socher 2016): good and featured articles of Wikipedia, two million words.

Text files, a paragraph a line, words apart and rare ones written <unk>; CC BY-SA. Its home is gone, so nothing is
downloaded. The validation text is not read. Read as the paper does: basic English words, those seen at least
twice, <eos> after each line, empty ones too; so they are counted here.
"""

from .....errors import ReplearnError
from ..source import Root, Source, locate
from ..text import TextSet, read_lines, text_set

NAMES = ("{}.txt", "wiki.{}.tokens")  # plain, and as the release calls them


def load_wikitext2(source: Source, root: Root = None, min_count: int = 2) -> TextSet:
    folder = locate(source, root)
    name = next(name for name in NAMES if (folder / name.format("train")).exists())
    try:
        train, test = (read_lines(folder / name.format(split)) for split in ("train", "test"))
    except ReplearnError as error:
        raise ReplearnError(f"{error} {source.how}") from error
    return text_set(source.name, train, test, min_count)


WIKITEXT2 = Source(
    name="wikitext2",
    load=load_wikitext2,
    title="WikiText-2",
    num_train=2_086_708,
    num_test=246_217,
    folders=("wikitext-2",),
    patterns=tuple(name.format("train") for name in NAMES),
    how="Put train.txt and test.txt (or the release's wiki.*.tokens) into ROOT/wikitext-2.",
)
