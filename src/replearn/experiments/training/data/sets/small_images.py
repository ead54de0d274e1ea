"""Image sets that torchvision reads and downloads.

CIFAR's files are pickles, which can run code when they are read. A file is opened only if its md5 is the official
one, which torchvision knows; any other file is refused unread.
"""

import tarfile
import zlib
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .....errors import ReplearnError
from ..images import ImageSet, channel_statistics
from ..source import Root, Source, cure, find, locate, root_of

UNUSED = "unlabeled_X.bin"  # STL-10's images without labels, 2.6 GB


def load_images(source: Source, root: Root = None) -> ImageSet:
    """Read a data set; ReplearnError names each file that is missing or damaged, and the cure."""
    train, test = map(tensors_of, open_parts(source, locate(source, root)))
    return ImageSet(source.name, source.num_classes, *train, *test, *channel_statistics(train[0]))


def download_images(source: Source, root: Root = None) -> Path:
    """Fetch what is missing or damaged, by torchvision; the data set's folder."""
    if source.torchvision is None:
        raise ReplearnError(f"There is no address to download {source.title} from. {source.how}")
    folder = find(source, root) or root_of(root)[0].absolute() / source.folders[0]
    try:
        open_parts(source, folder, download=True)
    except (OSError, RuntimeError, HTTPException, tarfile.TarError, EOFError, zlib.error) as error:
        raise ReplearnError(
            f"{source.title} could not be downloaded to {folder}: {str(error).rstrip('.')}. Try again later, or "
            f"bring it by hand: {source.how}"
        ) from error
    return folder


def open_parts(source: Source, folder: Path, download: bool = False) -> list[Any]:
    """torchvision's training and test part; its constructors, too, check every md5 before they read a file."""
    try:
        from torchvision import datasets
        from torchvision.datasets.utils import download_and_extract_archive

        kind: Any = getattr(datasets, str(source.torchvision))
        if kind is datasets.STL10:
            used = [file for file in kind.train_list if file[0] != UNUSED]
            kind = type("LabelledSTL10", (kind,), {"train_list": used})
        root = folder.parent if hasattr(kind, "base_folder") else folder
        wrong = wrong_files(kind, folder)
        if wrong and not download:
            raise ReplearnError(f"{'; '.join(wrong)}. {cure(source)}")
        if wrong and hasattr(kind, "tgz_md5"):  # kind.download takes CIFAR without its meta for whole
            download_and_extract_archive(kind.url, root, filename=kind.filename, md5=kind.tgz_md5)
        return [kind(root, split, download=download) for split in source.splits]
    except ImportError as error:
        raise ReplearnError(
            f"Reading {source.title} needs {error.name}, which is not installed: pip install 'replearn[train]'."
        ) from error


def wrong_files(kind: Any, folder: Path) -> list[str]:
    """What is wrong with each official file that is missing or whose md5 differs."""
    from torchvision.datasets.utils import check_integrity

    if hasattr(kind, "split_list"):  # SVHN
        files = [kind.split_list[split][1:] for split in ("train", "test")]
    else:
        files = [*kind.train_list, *kind.test_list]
    if hasattr(kind, "meta"):  # CIFAR
        files.append((kind.meta["filename"], kind.meta["md5"]))
    wrong = []
    for path, md5 in ((folder / name, md5) for name, md5 in files):
        try:
            if not path.is_file():
                wrong.append(f"{path} is missing")
            elif not check_integrity(path, md5):
                wrong.append(f"{path} is damaged or another file: its md5 is not the official {md5}")
        except OSError as error:
            wrong.append(f"{path} can't be read ({error})")
    return wrong


def tensors_of(part: Any) -> tuple[Tensor, Tensor]:
    """uint8 images (N, C, H, W) and int64 labels of one of torchvision's data sets."""
    images = torch.from_numpy(part.data)
    if hasattr(part, "targets"):  # CIFAR: channels last
        return images.permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)
    return images.contiguous(), torch.from_numpy(part.labels).long()


CIFAR10 = Source(
    name="cifar10",
    title="CIFAR-10",
    load=load_images,
    num_classes=10,
    shape=(3, 32, 32),
    num_train=50_000,
    num_test=10_000,
    folders=("cifar-10-batches-py",),
    patterns=("*_batch*",),
    how="unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz into the root.",
    torchvision="CIFAR10",
    splits=(True, False),
)
CIFAR100 = replace(
    CIFAR10,
    name="cifar100",
    title="CIFAR-100",
    num_classes=100,
    folders=("cifar-100-python",),
    patterns=("train", "test"),
    how="unpack https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz into the root.",
    torchvision="CIFAR100",
)
SVHN = replace(  # the extra training images (extra_32x32.mat) are not used
    CIFAR10,
    name="svhn",
    title="SVHN",
    num_train=73_257,
    num_test=26_032,
    folders=("svhn", "SVHN", ""),
    patterns=("train_32x32.mat", "test_32x32.mat"),
    how=(
        "put http://ufldl.stanford.edu/housenumbers/train_32x32.mat and test_32x32.mat into the folder svhn below "
        "the root."
    ),
    torchvision="SVHN",
    splits=("train", "test"),
)
STL10 = replace(
    SVHN,
    name="stl10",
    title="STL-10",
    shape=(3, 96, 96),
    num_train=5_000,
    num_test=8_000,
    folders=("stl10_binary",),
    patterns=("train_X.bin", "test_X.bin"),
    how="unpack http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz into the root.",
    torchvision="STL10",
)
