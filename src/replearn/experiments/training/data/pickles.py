"""The python version of CIFAR is a pickle, and a pickle can run any code: read it without running any.

The names a NumPy array is pickled under stand for the small classes below, and every other name is refused.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import ReplearnError


class _Stub:
    """Stands for numpy.dtype and for a numpy.ndarray: made from some arguments, then given a state."""

    state: object = None

    def __init__(self, code: object = b"", *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        self.state = state

    def tensor(self) -> Tensor:
        """The array, if it is a well-formed one of uint8 rows."""
        match self.state:
            case (int(), (int(rows), int(columns)), _Stub(code=b"u1" | "u1"), False, bytes(raw)):
                if rows > 0 and math.prod((rows, columns)) == len(raw):
                    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(rows, columns)
        raise ReplearnError("its array is not one of uint8 rows")


ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Stub,
    ("numpy._core.multiarray", "_reconstruct"): _Stub,
    ("numpy", "ndarray"): "ndarray",  # only ever handed to _reconstruct
    ("numpy", "dtype"): _Stub,
}


# The unpickler written in Python, not the one in C: a broken file can make that one reserve gigabytes.
class _Reader(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ReplearnError(f"it asks for {module}.{name}, which no CIFAR file needs; it may be harmful")
        return ALLOWED[module, name]


def images_and_labels(path: Path, labels_key: bytes) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels of one pickled CIFAR file; nothing in it is run."""
    try:
        table = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        array, labels = table[b"data"].tensor(), table[labels_key]
        if array.shape[1] != 3072:
            raise ReplearnError(f"its array has the shape {tuple(array.shape)}, not (images, 3072)")
        if not all(isinstance(label, int) and abs(label) < 2**31 for label in labels):
            raise ReplearnError("its labels are not small whole numbers")
    except OSError:
        raise
    except ReplearnError as error:
        raise ReplearnError(f"{path} was not read: {error}.") from error
    except Exception as error:  # a broken pickle can fail in any way at all
        raise ReplearnError(
            f"{path} is cut off or no file of CIFAR ({type(error).__name__}: {str(error)[:80]})."
        ) from error
    return array.reshape(-1, 3, 32, 32).contiguous(), torch.tensor(labels, dtype=torch.int64)
