"""Read torch.distributed.checkpoint's files without trust: its own reader unpickles whatever a file says.

The index of a sharded checkpoint (`.metadata`) is a pickle, and so are plain values in the shards. Here an index
may name the few classes that an index is made of and nothing else, values are read with `weights_only`, and the
files it points at lie in the folder itself.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ...errors import ReplearnError

LARGEST = 256 * 2**20  # bytes of an index
OURS = "torch.distributed.checkpoint."
INDEX_CLASSES = {
    "Metadata": (f"{OURS}metadata",),
    "TensorStorageMetadata": (f"{OURS}metadata",),
    "BytesStorageMetadata": (f"{OURS}metadata",),
    "ChunkStorageMetadata": (f"{OURS}metadata",),
    "TensorProperties": (f"{OURS}metadata",),
    "MetadataIndex": (f"{OURS}metadata",),
    "StorageMeta": (f"{OURS}metadata",),
    "_MEM_FORMAT_ENCODING": (f"{OURS}metadata",),
    "_StorageInfo": (f"{OURS}filesystem",),
    "Size": ("torch",),
    "device": ("torch",),
    "_get_layout": ("torch.serialization",),
    "OrderedDict": ("collections",),
    "PosixPath": ("pathlib", "pathlib._local"),
    "WindowsPath": ("pathlib", "pathlib._local"),
}


class IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index and torch's dtypes; any other name ends it before anything runs."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or module in INDEX_CLASSES.get(name, ()):
            if name in ("PosixPath", "WindowsPath"):
                return PurePath  # the folder it was written to, which is only text to us
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint holds")


class SafeReader(FileSystemReader):
    """Reads a folder of shards whose index it does not trust."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = read_index(self.folder / ".metadata")
        about = getattr(found, "storage_meta", None) or StorageMeta()
        about.load_id = self.load_id
        found.storage_meta = about
        return found


class SafePlanner(DefaultLoadPlanner):
    """Reads plain values as `torch.load(weights_only=True)` does."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        again = BytesIO()
        torch.save(loaded, again)  # only what was proven harmless reaches the reader that trusts
        again.seek(0)
        super().load_bytes(read_item, again)


def read_index(path: Path) -> Metadata:
    """The index of a sharded checkpoint; ReplearnError if it is none, or points out of its folder."""
    size = path.stat().st_size
    if size > LARGEST:
        raise ReplearnError(f"its index has {size:,} bytes, and at most {LARGEST:,} are read.")
    try:
        with open(path, "rb") as file:
            found = IndexUnpickler(file).load()
    except Exception as error:  # a broken pickle can fail in any way at all
        raise ReplearnError(f"its index is damaged or not one of ours ({str(error)[:200]}).") from error
    if not isinstance(found, Metadata):
        raise ReplearnError(f"its index is a {type(found).__name__}, and not one of ours.")
    for info in (found.storage_data or {}).values():
        if not isinstance(info.relative_path, str) or PurePath(info.relative_path).name != info.relative_path:
            raise ReplearnError(f"its index points out of the folder, at {ascii(info.relative_path)[:80]}.")
    return found
