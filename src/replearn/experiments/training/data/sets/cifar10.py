"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32 in 10 classes.

Binary version: records of 3,073 bytes, the label and then the red, green and blue planes.
Python version: a pickle a batch, read without running anything in it.
Checksums: those of the official page and of torchvision; of the binary files, those that the files in
the official archive have.
"""

from functools import partial
from pathlib import Path

from torch import Tensor

from ..images import load_images, records_of
from ..pickles import images_and_labels
from ..source import Download, Layout, OfficialFile, Source

HOME = "https://www.cs.toronto.edu/~kriz"
MD5 = {  # file: binary version, python version
    "data_batch_1": ("5dd7e06a14cb22eb9f671a540d1b7c25", "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": ("5ea93a67294ea407fff1d09f752e9692", "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": ("942cd6a4bcdd0dd3c604fbe906cb4421", "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": ("ae636b3ba5c66a11e91e8cb52e771fcb", "634d18415352ddfa80567beed471001a"),
    "data_batch_5": ("53f37980c15c3d472c316c40844f3f0d", "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": ("803d5f7f4d78ea53de84dbe85f74fb6d", "40351d587109b95175f43aff81a1287e"),
}


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    records = records_of(path, 1 + 3072)
    return records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()


def batches(version: int, suffix: str) -> tuple[OfficialFile, ...]:
    return tuple(
        OfficialFile(
            name=stem + suffix,
            md5=sums[version],
            split="test" if stem == "test_batch" else "train",
            num_images=10_000,
        )
        for stem, sums in MD5.items()
    )


SOURCE = Source(
    name="cifar10",
    title="CIFAR-10",
    num_classes=10,
    shape=(3, 32, 32),
    num_train=50_000,
    num_test=10_000,
    layouts=(
        Layout(
            name="binary",
            folders=("cifar-10-batches-bin",),
            signs=("*_batch*.bin",),
            files=batches(0, ".bin"),
            downloads=(Download(url=f"{HOME}/cifar-10-binary.tar.gz", md5="c32a1d4ab5d03f1284b67883e8d87530"),),
            read=read_binary,
        ),
        Layout(
            name="python",
            folders=("cifar-10-batches-py",),
            signs=("*_batch*",),
            files=batches(1, ""),
            read=partial(images_and_labels, labels_key=b"labels"),
        ),
    ),
    how=f"unpack {HOME}/cifar-10-binary.tar.gz into the root.",
)
load = partial(load_images, SOURCE)
