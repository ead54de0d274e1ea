"""CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32 in 100 fine classes.

Binary version: records of 3,074 bytes, the coarse label, the fine label and the three planes.
Python version: a pickle a split, read without running anything in it. The coarse labels are not used.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from ..pickles import images_and_labels
from ..reading import load_images, records_of
from ..source import Download, Layout, OfficialFile, Source

HOME = "https://www.cs.toronto.edu/~kriz"


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    records = records_of(path, 2 + 3072)
    return records[:, 2:].reshape(-1, 3, 32, 32).contiguous(), records[:, 1].long()


def read_python(path: Path) -> tuple[Tensor, Tensor]:
    return images_and_labels(path, b"fine_labels")


SOURCE = Source(
    name="cifar100",
    title="CIFAR-100",
    num_classes=100,
    shape=(3, 32, 32),
    num_train=50_000,
    num_test=10_000,
    layouts=(
        Layout(
            name="binary",
            folders=("cifar-100-binary",),
            signs=("train.bin", "test.bin"),
            files=(
                OfficialFile(
                    name="train.bin", md5="6172c7755cfe09b2fe270c85cebc1b15", split="train", num_images=50_000
                ),
                OfficialFile(
                    name="test.bin", md5="4499cfba6c016c1be1438163640a0898", split="test", num_images=10_000
                ),
            ),
            downloads=(Download(url=f"{HOME}/cifar-100-binary.tar.gz", md5="03b5dce01913d631647c71ecec9e9cb8"),),
            read=read_binary,
        ),
        Layout(
            name="python",
            folders=("cifar-100-python",),
            signs=("train", "test"),
            files=(
                OfficialFile(
                    name="train", md5="16019d7e3df5f24257cddd939b257f8d", split="train", num_images=50_000
                ),
                OfficialFile(name="test", md5="f0ef6b0ae62326f3e7ffdfab6717acfc", split="test", num_images=10_000),
                OfficialFile(name="meta", md5="7973b15100ade9c7d40fb424638fde48", required=False),
            ),
            downloads=(Download(url=f"{HOME}/cifar-100-python.tar.gz", md5="eb9058c3a382ffc7106e4002c42a8d85"),),
            read=read_python,
        ),
    ),
    how=f"unpack {HOME}/cifar-100-binary.tar.gz into the root.",
)
load = partial(load_images, SOURCE)
