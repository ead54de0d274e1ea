"""Tiny data sets in their official layouts, with torchvision told to expect their checksums."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, STL10, SVHN

Written = dict[str, tuple[Tensor, Tensor]]  # split -> images, labels


def pictures(count: int, size: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(classes, (count,), generator=generator)
    labels[-1] = classes - 1  # the highest label is there
    return images, labels


def parts(size: int, classes: int) -> Written:
    return {"train": pictures(10, size, classes, 1), "test": pictures(5, size, classes, 2)}


def write_cifar(root: Path, patch: pytest.MonkeyPatch, kind: type, classes: int) -> Written:
    written, key = parts(32, classes), "labels" if classes == 10 else "fine_labels"
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    for split, (images, labels) in written.items():
        files = getattr(kind, f"{split}_list")
        pieces = zip(files, images.chunk(len(files)), labels.chunk(len(files)), strict=True)
        sums = []
        for (name, _), some, numbers in pieces:
            raw = pickle.dumps({"data": some.flatten(1).numpy(), key: numbers.tolist()}, protocol=2)
            (folder / name).write_bytes(raw)
            sums.append([name, md5(raw).hexdigest()])
        patch.setattr(kind, f"{split}_list", sums)
    raw = pickle.dumps({kind.meta["key"]: ["a class"] * classes}, protocol=2)
    (folder / kind.meta["filename"]).write_bytes(raw)
    patch.setattr(kind, "meta", {**kind.meta, "md5": md5(raw).hexdigest()})
    return written


def cifar10(root: Path, patch: pytest.MonkeyPatch) -> Written:
    return write_cifar(root, patch, CIFAR10, 10)


def cifar100(root: Path, patch: pytest.MonkeyPatch) -> Written:
    return write_cifar(root, patch, CIFAR100, 100)


def svhn(root: Path, patch: pytest.MonkeyPatch) -> Written:
    from scipy.io import savemat

    written, splits = parts(32, 10), {}
    (root / "svhn").mkdir(parents=True)
    for split, (images, labels) in written.items():
        url, name, _ = SVHN.split_list[split]
        digits = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]  # official: 10 stands for 0
        savemat(root / "svhn" / name, {"X": images.permute(2, 3, 1, 0).numpy(), "y": digits})
        splits[split] = [url, name, md5((root / "svhn" / name).read_bytes()).hexdigest()]
    patch.setattr(SVHN, "split_list", splits)
    return written


def stl10(root: Path, patch: pytest.MonkeyPatch) -> Written:
    written, folder = parts(96, 10), root / "stl10_binary"
    folder.mkdir(parents=True)
    for split, (images, labels) in written.items():
        held = {"X": images.transpose(2, 3).contiguous(), "y": (labels + 1).to(torch.uint8)}  # columns first
        sums = []
        for name, values in held.items():
            raw = values.numpy().tobytes()
            (folder / f"{split}_{name}.bin").write_bytes(raw)
            sums.append([f"{split}_{name}.bin", md5(raw).hexdigest()])
        patch.setattr(STL10, f"{split}_list", sums)
    return written


LAYOUTS: dict[str, Callable[[Path, pytest.MonkeyPatch], Written]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "stl10": stl10,
}


def write_imagenet(folder: Path, train: int, val: int) -> None:
    """Two classes of so many pictures each."""
    pillow = pytest.importorskip("PIL.Image")
    for split, count in (("train", train), ("val", val)):
        for number in range(2):
            inside = folder / split / f"n0{number}"
            inside.mkdir(parents=True)
            for index in range(count):
                pillow.new("RGB", (40, 36), (200 * number, 20 * index, 99)).save(inside / f"{index}.JPEG")
