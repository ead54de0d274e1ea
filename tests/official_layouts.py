"""Writes tiny data sets in their official layouts, and says what was written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Written = dict[str, tuple[Tensor, Tensor]]  # split -> images, labels


def pictures(count: int, size: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(classes, (count,), generator=generator)
    labels[-1] = classes - 1  # the highest label is there
    return images, labels


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def flat(images: Tensor) -> np.ndarray:
    return images.reshape(len(images), -1).numpy()


def cifar10_binary(root: Path) -> Written:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    parts = [pictures(4, 32, 10, seed) for seed in range(6)]
    for number, (images, labels) in enumerate(parts):
        name = f"data_batch_{number + 1}.bin" if number < 5 else "test_batch.bin"
        rows = np.concatenate([labels.numpy().astype(np.uint8)[:, None], flat(images)], axis=1)
        (folder / name).write_bytes(rows.tobytes())
    return {"train": joined(parts[:5]), "test": parts[5]}


def cifar10_python(root: Path) -> Written:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    parts = [pictures(4, 32, 10, seed) for seed in range(6)]
    for number, (images, labels) in enumerate(parts):
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        (folder / name).write_bytes(python2_pickle(flat(images), labels.tolist()))
    return {"train": joined(parts[:5]), "test": parts[5]}


def cifar100_binary(root: Path) -> Written:
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    written = {"train": pictures(10, 32, 100, 1), "test": pictures(5, 32, 100, 2)}
    for split, (images, labels) in written.items():
        fine = labels.numpy().astype(np.uint8)[:, None]
        (folder / f"{split}.bin").write_bytes(np.concatenate([fine // 5, fine, flat(images)], axis=1).tobytes())
    return written


def cifar100_python(root: Path) -> Written:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    written = {"train": pictures(10, 32, 100, 1), "test": pictures(5, 32, 100, 2)}
    for split, (images, labels) in written.items():
        # protocol 3 from Python 3: other opcodes and another module name than Python 2 wrote
        table = {b"fine_labels": labels.tolist(), b"coarse_labels": [0] * len(labels), b"data": flat(images)}
        (folder / split).write_bytes(pickle.dumps(table, protocol=3))
    return written


def svhn_mat(root: Path) -> Written:
    from scipy.io import savemat

    folder = root / "svhn"
    folder.mkdir(parents=True)
    written = {"train": pictures(10, 32, 10, 1), "test": pictures(5, 32, 10, 2)}
    for split, (images, labels) in written.items():
        digits = labels.numpy().astype(np.uint8)
        y = np.where(digits == 0, 10, digits)[:, None]  # official: 10 stands for 0
        savemat(
            folder / f"{split}_32x32.mat", {"X": images.permute(2, 3, 1, 0).numpy(), "y": y}, do_compression=True
        )
    return written


def stl10_binary(root: Path) -> Written:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    written = {"train": pictures(6, 96, 10, 1), "test": pictures(3, 96, 10, 2)}
    for split, (images, labels) in written.items():
        columns_first = np.stack([[plane.T for plane in image] for image in images.numpy()])
        (folder / f"{split}_X.bin").write_bytes(columns_first.tobytes())
        (folder / f"{split}_y.bin").write_bytes((labels.numpy() + 1).astype(np.uint8).tobytes())
    return written


LAYOUTS: dict[str, Callable[[Path], Written]] = {
    "cifar10/binary": cifar10_binary,
    "cifar10/python": cifar10_python,
    "cifar100/binary": cifar100_binary,
    "cifar100/python": cifar100_python,
    "svhn/MATLAB": svhn_mat,
    "stl10/binary": stl10_binary,
}


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """A CIFAR-10 batch opcode by opcode as Python 2 and NumPy 1 pickled it: byte strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value  # SHORT_BINSTRING

    def number(value: int) -> bytes:
        return b"K" + bytes([value]) if value < 256 else b"M" + value.to_bytes(2, "little")

    raw = data.tobytes()
    kind = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    )
    shape = number(data.shape[0]) + number(data.shape[1]) + b"\x86"
    array += b"(" + number(1) + shape + kind + b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    rows = b"](" + b"".join(number(label) for label in labels) + b"e"
    entries = text(b"batch_label") + text(b"a batch") + text(b"labels") + rows + text(b"data") + array
    return b"\x80\x02}(" + entries + b"u."
