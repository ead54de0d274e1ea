"""The python version of CIFAR is a pickle, and a pickle can run any code: read it without running any.

No class or function of the outside is ever reached: the names a NumPy array is pickled under stand
for the small classes below, every other name is refused, and NumPy itself sees none of the file.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import ReplearnError


class _Kind:
    """Stands for numpy.dtype."""

    def __init__(self, code: object = b"", *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and flags, which a byte has no use for."""


class _Array:
    """Stands for a numpy.ndarray: first made empty, then given its state."""

    state: object = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state

    def tensor(self) -> Tensor:
        """The array, if it is a well-formed one of uint8."""
        match self.state:
            case (int(), tuple(shape), _Kind(code=b"u1" | "u1"), bool(fortran), bytes(raw)):
                if not all(isinstance(side, int) and side > 0 for side in shape) or math.prod(shape) != len(raw):
                    raise ReplearnError(f"an array of shape {shape} in it has {len(raw):,} bytes")
                flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                return (
                    flat.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
                    if fortran
                    else flat.view(shape)
                )
        raise ReplearnError("an array in it is not one of uint8 numbers")


ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "ndarray",  # only ever handed to _reconstruct
    ("numpy", "dtype"): _Kind,
}


# The unpickler written in Python, not the one in C: a broken file can make that one reserve gigabytes.
class _Reader(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ReplearnError(f"it asks for {module}.{name}, which no CIFAR file needs; it may be harmful")
        return ALLOWED[module, name]


def read_table(path: Path) -> dict[bytes, Any]:
    """The dictionary in a pickle made of plain containers and uint8 arrays; nothing in it is run."""
    raw = path.read_bytes()
    try:
        table = _Reader(io.BytesIO(raw), encoding="bytes").load()
    except ReplearnError as error:
        raise ReplearnError(f"{path} was not read: {error}.") from error
    except Exception as error:  # a broken pickle can fail in any way at all
        raise ReplearnError(
            f"{path} is cut off or no pickle ({type(error).__name__}: {str(error)[:80]}; {len(raw):,} bytes)."
        ) from error
    if not isinstance(table, dict):
        raise ReplearnError(f"{path} holds a {type(table).__name__}, not the dictionary of a CIFAR file.")
    return table


def images_and_labels(path: Path, labels_key: bytes) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels of one pickled CIFAR file."""
    table = read_table(path)
    array, labels = table.get(b"data"), table.get(labels_key)
    if not isinstance(array, _Array) or not isinstance(labels, list):
        known = ", ".join(repr(key) for key in table)[:200]
        raise ReplearnError(f"{path} lacks b'data' or {labels_key!r}; it has {known or 'nothing'}.")
    try:
        flat = array.tensor()
    except ReplearnError as error:
        raise ReplearnError(f"{path} was not read: {error}.") from error
    if flat.ndim != 2 or flat.shape[1] != 3072:
        raise ReplearnError(f"{path} holds an array of shape {tuple(flat.shape)}, not of (images, 3072).")
    if not all(isinstance(label, int) and abs(label) < 2**31 for label in labels):
        raise ReplearnError(f"{path} holds labels that are not small whole numbers.")
    return flat.reshape(-1, 3, 32, 32).contiguous(), torch.tensor(labels, dtype=torch.int64)
