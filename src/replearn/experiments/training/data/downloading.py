"""A whole data set from its official addresses: fetched, unpacked aside, checked, then moved into place."""

from __future__ import annotations

import os
import posixpath
import tarfile
import tempfile
import zlib
from pathlib import Path

from ....errors import ReplearnError
from .fetching import PATIENT, Patience, Progress, fetch, put_in_place
from .inspection import check_files, md5_of
from .places import find, root_of
from .source import Download, Layout, Source


def download_source(
    source: Source,
    root: str | os.PathLike[str] | None = None,
    *,
    layout: str | None = None,
    mirror: str | None = None,
    patience: Patience = PATIENT,
    progress: Progress | None = None,
) -> Path:
    """See `replearn.experiments.training.data.download`."""
    chosen = _choose(source, layout)
    base = root_of(root)[0].absolute()
    found = find(source, root)
    folder = found[0] if found and found[1] is chosen else base / chosen.folders[0]
    if all(check.verdict in ("ok", "no official sum") for check in check_files(chosen, folder)):
        return folder
    for item in chosen.downloads:
        url = f"{mirror.rstrip('/')}/{item.filename}" if mirror else item.url
        target = base / item.filename if item.archive else folder / item.filename
        fetched = fetch(url, target, item.md5, patience, progress)
        if item.archive:
            _unpack(item, target, chosen, folder)
            if fetched:  # one that was there already is not ours to delete
                target.unlink(missing_ok=True)
    return folder


def _choose(source: Source, layout: str | None) -> Layout:
    with_address = [entry for entry in source.layouts if entry.downloads]
    if not with_address:
        raise ReplearnError(f"There is no address to download {source.title} from. {source.how}")
    for entry in with_address:
        if layout in (None, entry.name):
            return entry
    names = ", ".join(entry.name for entry in with_address)
    raise ReplearnError(f"{source.title} can't be downloaded in a {layout!r} layout; write one of: {names}.")


def _unpack(item: Download, archive: Path, layout: Layout, folder: Path) -> None:
    """Take the layout's files out of an archive, and nothing else; whole, or not at all."""
    if not hasattr(tarfile, "data_filter"):
        raise ReplearnError(f"Unpacking {archive} safely needs Python 3.11.4 or newer; install that first.")
    inside = layout.folders[0]
    wanted = {f"{inside}/{file.name}": file for file in layout.files}
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{inside}.") as scratch:
            with tarfile.open(archive) as tar:
                for member in tar:
                    tarfile.data_filter(member, scratch)  # refuses paths and links that lead outside
                    if posixpath.normpath(member.name) in wanted and member.isreg():
                        tar.extract(member, scratch, filter="data")
            unpacked = Path(scratch) / inside
            for file in wanted.values():
                path = unpacked / file.name
                if file.required and not path.is_file():
                    raise ReplearnError(
                        f"{archive} lacks {inside}/{file.name}; it is not what {item.url} should be."
                    )
            if not folder.exists():
                os.rename(unpacked, folder)
                return
            for file in wanted.values():
                new, old = unpacked / file.name, folder / file.name
                if new.is_file() and md5_of(new) != md5_of(old):
                    put_in_place(new, old)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ReplearnError(f"Can't unpack {archive}: {error}. Nothing was changed in {folder}.") from error
