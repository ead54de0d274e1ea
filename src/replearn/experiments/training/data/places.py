"""Where data is looked for: the root that was given, else REPLEARN_DATA, else ./data."""

from __future__ import annotations

import os
from pathlib import Path

from ....errors import ReplearnError
from .source import Layout, Source

VARIABLE = "REPLEARN_DATA"


def root_of(root: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """The folder of all data, and in words why it is this one."""
    if root is not None:
        return Path(root).expanduser(), "the root that was given"
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser(), f"from the environment variable {VARIABLE}"
    return Path("data"), f"the default, since neither a root nor {VARIABLE} was given"


def places_of(source: Source, root: str | os.PathLike[str] | None) -> list[tuple[Path, Layout]]:
    """Every folder where the data set may be, with the layout it would have there."""
    base = root_of(root)[0].absolute()
    places = []
    for layout in source.layouts:
        places += [(base / folder, layout) for folder in layout.folders]
        if base.name in layout.folders:  # the root is the data set's own folder
            places.append((base, layout))
    return places


def find(source: Source, root: str | os.PathLike[str] | None) -> tuple[Path, Layout] | None:
    """The first whole copy, else the first that has something missing, else None."""
    try:
        found = [(folder, layout) for folder, layout in places_of(source, root) if layout.found_in(folder)]
        whole = [(folder, layout) for folder, layout in found if not layout.missing_in(folder)]
    except OSError as error:
        raise ReplearnError(f"Can't look for {source.title}: {error}.") from error
    return next(iter(whole or found), None)


def locate(source: Source, root: str | os.PathLike[str] | None) -> tuple[Path, Layout]:
    """As `find`; ReplearnError that says where was looked and how to get what is missing."""
    found = find(source, root)
    if found is None:
        base, why = root_of(root)
        looked = ", ".join(dict.fromkeys(str(folder) for folder, _ in places_of(source, root)))
        raise ReplearnError(
            f"{source.title} was not found. Looked in {looked}; the root {base} is {why}. {cure(source)}"
        )
    folder, layout = found
    if missing := layout.missing_in(folder):
        raise ReplearnError(
            f"{folder / missing[0]} is missing, so {source.title} in {folder} ({layout.name} layout) is not whole"
            + (f" ({len(missing)} files are missing)" if len(missing) > 1 else "")
            + f". {cure(source)}"
        )
    return folder, layout


def cure(source: Source) -> str:
    """What to do about data that is missing or broken."""
    if any(layout.downloads for layout in source.layouts):
        return f"Get it with `replearn data download {source.name}`, or by hand: {source.how}"
    return source.how
