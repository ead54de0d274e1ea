"""HTML by small functions: everything that comes from a file is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape


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


def table(
    heads: Sequence[str], rows: Sequence[Sequence[Content]], left: Sequence[int] = (0,), label: str = ""
) -> Raw:
    """A table that scrolls sideways on a phone; columns are right-aligned but those in `left`."""

    def cells(kind: str, row: Sequence[Content]) -> Raw:
        return join(
            *(
                tag(kind, cell, class_="l" if index in left else "r", **({"scope": "col"} if kind == "th" else {}))
                for index, cell in enumerate(row)
            )
        )

    head = tag("thead", tag("tr", cells("th", heads)))
    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="scroll", tabindex="0", role="region", aria_label=label)


def columns(entries: Mapping[str, Sequence[Content]], left: Sequence[str], label: str = "") -> Raw:
    """A table by columns; those that have nothing to say are left out."""
    kept = {head: list(cells) for head, cells in entries.items() if any(text_of(cell) for cell in cells)}
    places = [index for index, head in enumerate(kept) if head in left]
    return table(list(kept), list(zip(*kept.values(), strict=True)), places, label)


def counted(count: int, thing: str) -> str:
    """A number with its noun.

    >>> counted(1, "run"), counted(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def fold(summary: Content, *inside: Content, open_: bool = False, class_: str = "") -> Raw:
    """Something that opens on a click."""
    attributes: dict[str, str | bool] = {"open": open_}
    if class_:
        attributes["class_"] = class_
    return tag("details", tag("summary", summary), *inside, **attributes)
