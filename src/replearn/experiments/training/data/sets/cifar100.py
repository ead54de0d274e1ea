"""CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32 in 100 fine classes.

Binary version: records of 3,074 bytes, the coarse label, the fine label and the three planes.
Python version: a pickle a split, read without running anything in it. The coarse labels are not used.
"""

from functools import partial
from pathlib import Path

from torch import Tensor

from ..images import load_images, records_of
from ..pickles import images_and_labels
from ..source import Download, Layout, OfficialFile, Source

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    records = records_of(path, 2 + 3072)
    return records[:, 2:].reshape(-1, 3, 32, 32).contiguous(), records[:, 1].long()


def parts(suffix: str, train: str, test: str) -> tuple[OfficialFile, ...]:
    return (
        OfficialFile(name=f"train{suffix}", md5=train, split="train", num_images=50_000),
        OfficialFile(name=f"test{suffix}", md5=test, split="test", num_images=10_000),
    )


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
            files=parts(".bin", "6172c7755cfe09b2fe270c85cebc1b15", "4499cfba6c016c1be1438163640a0898"),
            downloads=(Download(url=ADDRESS, md5="03b5dce01913d631647c71ecec9e9cb8"),),
            read=read_binary,
        ),
        Layout(
            name="python",
            folders=("cifar-100-python",),
            signs=("train", "test"),
            files=parts("", "16019d7e3df5f24257cddd939b257f8d", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
            read=partial(images_and_labels, labels_key=b"fine_labels"),
        ),
    ),
    how=f"unpack {ADDRESS} into the root.",
)
load = partial(load_images, SOURCE)
