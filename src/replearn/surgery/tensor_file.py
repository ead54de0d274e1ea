"""One safetensors file with a checksum, written atomically; a file is checked when it is read.

The format is eight bytes of header length, a JSON header, and the tensors' bytes. The writer of safetensors needs
NumPy and all tensors on the CPU at once; this one copies a single tensor at a time. Reading is left to
safetensors, which maps the file and checks its layout.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import ReplearnError

PART = ".replearn-part"  # the suffix of a file that is being written
LARGEST_HEADER = 32 * 2**20  # bytes; the header of a thousand layers has less than 2**20

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_file(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write the tensors and the texts; the file at `path` is replaced once all is on the disk."""
    refuse_special(path)
    with replacing(path) as file:
        file.write(header(tensors, {**about, "checksum": "0" * 64}))
        digest = checksum(tensors, about, file.write)  # reads each tensor once, since other threads may change it
        file.seek(0)  # the header with the checksum has the same length
        file.write(header(tensors, {**about, "checksum": digest}))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces the one at `path` at the end of the block, once it is on the disk."""
    temporary = path.with_name(f".{uuid4().hex}{PART}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    with suppress(OSError):  # flush the folder's entry too; not every system can do this
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def refuse_special(path: Path) -> None:
    """Raise if the file would replace a device, a pipe, a socket or a folder."""
    if os.path.lexists(path) and not path.is_file():
        raise ReplearnError(
            f"{path} is no regular file, and would be replaced by one. Write the name of a new file."
        )


def read_file(path: Path, kind: str, largest: int | None = None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The texts and the tensors of a file of this `format`, checked against its checksum.

    A file of more than `largest` bytes is refused before it is read.
    """
    if path.is_dir():
        raise ReplearnError(f"{path} is a folder. Write the name of the file in it.")
    if not path.is_file():
        raise ReplearnError(f"There is no file {path}. Check the name; replearn.save writes one.")
    check_start(path, largest)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about: dict[str, str] = file.metadata() or {}
            if about.get("format") != kind:
                raise ReplearnError(
                    f"{path} is a safetensors file, but not a replearn checkpoint of this version (its format is "
                    f"{ascii(about.get('format'))[:60]}, not {kind!r}). Write it with replearn.save."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except ReplearnError:
        raise
    except Exception as error:
        raise ReplearnError(
            f"{path} is not a readable safetensors file ({error}). It may be cut off or damaged: use another copy."
        ) from error
    if about.get("checksum") != checksum(tensors, {key: about[key] for key in about if key != "checksum"}):
        raise ReplearnError(f"{path} is damaged: its contents do not match its checksum. Use another copy.")
    return about, tensors


def check_start(path: Path, largest: int | None) -> None:
    """Raise for a pickle, a huge header or a huge file, by the first bytes and the size."""
    with open(path, "rb") as file:
        start = file.read(9)
    # a safetensors file starts with the length of its header, which may be any byte, and then the header's {
    if start.startswith((b"PK\x03\x04", b"\x80")) and not start.endswith(b"{"):
        raise ReplearnError(
            f"{path} looks like a file of torch.save, which is a pickle and can run code when it is read. Nothing "
            "is unpickled here: write the checkpoint with replearn.save."
        )
    declared = int.from_bytes(start[:8], "little")
    if declared > LARGEST_HEADER:
        raise ReplearnError(
            f"{path} is not a readable safetensors file (it declares a header of {declared:,} bytes, and at most "
            f"{LARGEST_HEADER:,} are read). It may be cut off or damaged: use another copy."
        )
    size = path.stat().st_size
    if largest is not None and size > largest:
        raise ReplearnError(
            f"{path} has {size:,} bytes, and a checkpoint of this model has at most {largest:,}. Use the "
            "architecture it was saved from."
        )


def checksum(
    tensors: Mapping[str, Tensor],
    about: Mapping[str, str],
    put: Callable[[memoryview], object] = lambda data: None,
) -> str:
    """SHA-256 of the texts, and of names, dtypes, shapes and bytes of the tensors, in file order.

    `put` is called with the bytes of each tensor.
    """
    digest = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name, tensor in in_order(tensors).items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        plain = on_cpu(tensor)
        digest.update(bytes_of(plain))
        put(bytes_of(plain))
    return digest.hexdigest()


def header(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, tensor in in_order(tensors).items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wide elements first, so that every tensor is aligned; then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, without a copy and without NumPy; valid while the tensor lives."""
    size = tensor.nbytes
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")
