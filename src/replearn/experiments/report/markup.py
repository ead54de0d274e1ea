"""HTML by small functions: everything that comes from a file is escaped here, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .svg import Drawing, inline_svg

VERDICTS = ("better", "worse", "undecided")
SENTENCE = 60  # letters that no narrow column takes


@dataclass(frozen=True)
class Raw:
    """HTML that is ready: made by these functions, never read from a file."""

    text: str


Content = str | Raw


def text_of(content: Content) -> str:
    return content.text if isinstance(content, Raw) else escape(content)


def tag(name: str, *inside: Content, **attributes: str | bool) -> Raw:
    """An element; `class_` and `data_key` are written `class` and `data-key`.

    >>> tag("b", "1 < 2", class_="x").text
    '<b class="x">1 &lt; 2</b>'
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value), quote=True)}"')
        for key, value in attributes.items()
        if value is not False
    )
    return Raw(f"<{name}{shown}>{''.join(text_of(part) for part in inside)}</{name}>")


def join(*parts: Content) -> Raw:
    return Raw("".join(text_of(part) for part in parts))


def breakable(name: str) -> Raw:
    """A long name, which a narrow line breaks after its underscores and slashes."""
    return Raw(re.sub("[_/]", r"\g<0><wbr>", escape(name)))


def columns(entries: Mapping[str, Sequence[Content]], label: str = "") -> Raw:
    """A table by columns; those that have nothing to say are left out."""
    kept = {head: cells for head, cells in entries.items() if any(text_of(cell) for cell in cells)}
    return table(list(kept), list(zip(*kept.values(), strict=True)), label)


def table(heads: Sequence[str], rows: Sequence[Sequence[Content]], label: str = "") -> Raw:
    """A table that scrolls sideways on a phone, its first column in place; numbers are right-aligned."""
    sides = [_side(cells) for cells in zip(*rows, strict=True)] or ["l"] * len(heads)

    def cells(kind: str, row: Iterable[Content], **more: str) -> Raw:
        return join(*(tag(kind, cell, class_=side, **more) for cell, side in zip(row, sides, strict=True)))

    head = tag("thead", tag("tr", cells("th", heads, scope="col")))
    body = tag("tbody", *(tag("tr", cells("td", _shown(row))) for row in rows))
    return tag("div", tag("table", head, body), class_="scroll", tabindex="0", role="region", aria_label=label)


def _side(cells: Sequence[Content]) -> str:
    """The class of a column: numbers to the right, and sentences in a wide one."""
    texts = [re.sub(r"<[^>]*>", "", text_of(cell)) for cell in cells]
    number = r"[-+]?(\d[\d.,]*|inf|nan)( ± \S+| of \d+)?( \[.*\])?"
    if all(re.fullmatch(number, text) for text in texts if text):
        return "r"
    return "l long" if max(map(len, texts)) > SENTENCE else "l"


def verdict(word: str) -> Raw:
    return tag("span", word, class_=f"verdict {word}")


def _shown(row: Sequence[Content]) -> Iterator[Content]:
    """A text in backticks is code, and verdicts have their colour."""
    for cell in row:
        if not isinstance(cell, str):
            yield cell
        elif cell.startswith("`"):
            yield tag("code", cell.strip("`"))
        else:
            yield verdict(cell) if cell in VERDICTS else breakable(cell)


def counted(count: int, thing: str) -> str:
    """A number with its noun.

    >>> counted(1, "run"), counted(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def fold(summary: Content, *inside: Content, open_: bool = False) -> Raw:
    return tag("details", tag("summary", summary), *inside, open=open_)


def command(text: str) -> Raw:
    return join(tag("code", text), tag("button", "copy", type="button", class_="copy"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A piece of the page that the list of contents names; `words` are what the filter finds it by."""

    key: str
    title: str
    html: Raw
    words: str = ""


def card(key: str, title: str, *inside: Content) -> Entry:
    html = tag("section", tag("h2", title), *inside, class_="card", id=key)
    return Entry(key=key, title=title, html=html)


def folded(
    key: str, title: str, words: str, sentence: str, *inside: Content, chip: str = "", opened: bool = False
) -> Entry:
    """A card that opens on a click; closed it lies in a template, which the browser does not lay out."""
    chips = [tag("span", chip, class_="chip")] if chip else []
    summary = tag("summary", tag("h2", breakable(title), *chips), tag("p", sentence, class_="sentence"))
    held = tag("div", *inside, class_="inside")
    about: dict[str, str | bool] = {"id": key, "class_": "card comparison", "data_words": words, "open": opened}
    html = tag("details", summary, held if opened else tag("template", held), **about)
    return Entry(key=key, title=title, html=html, words=words)


def figures(drawings: Sequence[Drawing]) -> Raw:
    shown = []
    for drawing in drawings:
        about = f" {drawing.about[:1].upper()}{drawing.about[1:]}"
        caption = tag("figcaption", tag("b", f"{drawing.title}."), about)
        shown.append(tag("figure", Raw(inline_svg(drawing)), caption, id=drawing.name))
    return tag("div", *shown, class_="figures")


def trained_by(commands: Sequence[str], *more: Content) -> Raw:
    return fold("Trained by", tag("ul", *(tag("li", command(text)) for text in commands)), *more)
