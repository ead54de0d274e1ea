"""Image sets that torchvision reads and downloads.

CIFAR's files are pickles, which can run code when they are read. A file is opened only if its md5 is the official
one, which torchvision knows; any other file is refused unread.
"""

import tarfile
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import ReplearnError
from .images import ImageSet, channel_statistics
from .source import Root, Source, cure, find, locate, root_of


def load_images(source: Source, root: Root = None, strict_counts: bool = True) -> ImageSet:
    """Read a data set; ReplearnError names each file that is missing or damaged, and the cure.

    `strict_counts` changes nothing: files with the official md5 hold the official counts.
    """
    folder, kind = locate(source, root), dataset_class(source)
    if wrong := wrong_files(kind, folder):
        raise ReplearnError(f"{'; '.join(wrong)}. {cure(source)}")
    train, test = (tensors_of(kind(home(kind, folder), split)) for split in source.splits)
    return ImageSet(source.name, source.num_classes, *train, *test, *channel_statistics(train[0]))


def download_images(source: Source, root: Root = None) -> Path:
    """Fetch what is missing or damaged, by torchvision; the data set's folder."""
    if source.torchvision is None:
        raise ReplearnError(f"There is no address to download {source.title} from. {source.how}")
    kind = dataset_class(source)
    folder = find(source, root) or root_of(root)[0].absolute() / source.folders[0]
    try:
        for split in source.splits:
            kind(home(kind, folder), split, download=True)
    except (OSError, RuntimeError, HTTPException, tarfile.TarError, EOFError, zlib.error) as error:
        raise ReplearnError(
            f"{source.title} could not be downloaded to {home(kind, folder)}: {error}. Try again later, or bring "
            f"it by hand: {source.how}"
        ) from error
    return folder


def dataset_class(source: Source) -> Any:
    assert source.torchvision is not None
    try:
        return source.torchvision()
    except ImportError as error:
        raise ReplearnError(
            f"Reading {source.title} needs {error.name}, which is not installed: pip install 'replearn[train]'."
        ) from error


def home(kind: Any, folder: Path) -> Path:
    """The root that torchvision's class takes to find its files in this folder."""
    return folder.parent if hasattr(kind, "base_folder") else folder


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
    for name, md5 in files:
        path = folder / name
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
