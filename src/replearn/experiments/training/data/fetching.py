"""A data set from its official addresses: fetched, unpacked aside, checked, then moved into place."""

import os
import posixpath
import shutil
import tarfile
import tempfile
import time
import zlib
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ....errors import ReplearnError
from .source import Layout, Root, Source, check_files, find, md5_of, root_of

ATTEMPTS = 5
TIMEOUT = 30.0  # seconds without a byte
PAUSE = 1.0  # seconds before the second attempt, doubled before each further one


def download_source(source: Source, root: Root = None, mirror: str | None = None) -> Path:
    """See `replearn.experiments.training.data.download`."""
    chosen = next((layout for layout in source.layouts if layout.downloads), None)
    if chosen is None:
        raise ReplearnError(f"There is no address to download {source.title} from. {source.how}")
    base = root_of(root)[0].absolute()
    found = find(source, root)
    folder = found[0] if found and found[1] is chosen else base / chosen.folders[0]
    if all(check.verdict in ("ok", "no official sum") for check in check_files(chosen, folder)):
        return folder
    for item in chosen.downloads:
        url = f"{mirror.rstrip('/')}/{item.filename}" if mirror else item.url
        target = base / item.filename if item.archive else folder / item.filename
        fetched = fetch(url, target, item.md5)
        if item.archive:
            unpack(target, chosen, folder)
            if fetched:  # one that was there already is not ours to delete
                target.unlink(missing_ok=True)
    return folder


def fetch(url: str, target: Path, md5: str) -> bool:
    """Bring a file to `target`; False if the right one was there already.

    A wrong file already at `target` is kept beside it, as NAME.old, once the right one has arrived.
    """
    if not url.startswith(("http://", "https://")):
        raise ReplearnError(f"{url} is no address to fetch from; write one that starts with http:// or https://.")
    if md5_of(target) == md5:
        return False
    why: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            part = Path(scratch) / target.name
            for attempt in range(ATTEMPTS):
                time.sleep(min(60.0, PAUSE * 2 ** (attempt - 1)) if attempt else 0)
                why = _transfer(url, part, target)
                if why is not None:
                    continue
                if (found := md5_of(part)) != md5:
                    raise ReplearnError(
                        f"{url} gave a wrong file: it has the md5 {found}, and {md5} is expected. It was thrown "
                        f"away; nothing else was touched. Try again later, or put it at {target} by hand."
                    )
                put_in_place(part, target)
                return True
    except OSError as error:
        raise ReplearnError(f"Can't write to {target.parent}: {error}. Choose another root.") from error
    raise ReplearnError(
        f"{url} could not be fetched in {ATTEMPTS} attempts: {why}. Without a network, bring the file by "
        f"hand and put it at {target}."
    )


def _transfer(url: str, part: Path, target: Path) -> str | None:
    """Write the whole answer; what went wrong where another attempt is worth it, else None."""
    request = Request(url, headers={"User-Agent": "replearn", "Accept-Encoding": "identity"})
    try:
        with urlopen(request, timeout=TIMEOUT) as answer, open(part, "wb") as file:
            total = answer.length
            shutil.copyfileobj(answer, file)
            have = file.tell()
    except HTTPError as error:
        error.close()
        raise ReplearnError(
            f"{url} answered {error.code} ({error.reason}). Try again later, look for a mirror, or put the file "
            f"at {target} by hand."
        ) from error
    except (OSError, HTTPException) as error:  # URLError, timeouts and resets are OSErrors
        return str(error) or type(error).__name__
    if total is not None and have < total:
        return f"the connection was cut after {have:,} of {total:,} bytes"
    return None


def put_in_place(new: Path, target: Path) -> None:
    """Move a finished file to its place at once; one that was there is kept as NAME.old."""
    if target.exists():
        os.replace(target, target.with_name(f"{target.name}.old"))
    os.replace(new, target)


def unpack(archive: Path, layout: Layout, folder: Path) -> None:
    """Take the layout's files out of an archive, and nothing else; whole, or not at all."""
    if not hasattr(tarfile, "data_filter"):
        raise ReplearnError(f"Unpacking {archive} safely needs Python 3.11.4 or newer; install that first.")
    inside = layout.folders[0]
    wanted = {f"{inside}/{file.name}" for file in layout.files}
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{inside}.") as scratch:
            with tarfile.open(archive) as tar:
                for member in tar:
                    tarfile.data_filter(member, scratch)  # refuses paths and links that lead outside
                    if posixpath.normpath(member.name) in wanted and member.isreg():
                        tar.extract(member, scratch, filter="data")
            unpacked = Path(scratch) / inside
            if missing := layout.missing_in(unpacked):
                raise ReplearnError(f"{archive} lacks {inside}/{missing[0]}; it is not what it should be.")
            if not folder.exists():
                os.rename(unpacked, folder)
                return
            for new in unpacked.iterdir():
                if md5_of(new) != md5_of(folder / new.name):
                    put_in_place(new, folder / new.name)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ReplearnError(f"Can't unpack {archive}: {error}. Nothing was changed in {folder}.") from error
