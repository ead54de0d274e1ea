"""SVHN (Netzer et al. 2011), cropped digits: 73,257 + 26,032 colour images of 32x32 in 10 classes.

MATLAB files of version 5: `X` is (32, 32, 3, images), `y` the digits, where 10 stands for 0. The extra
training images (extra_32x32.mat) are not used.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .....errors import ReplearnError
from ..images import counted_from_one, load_images
from ..source import Download, Layout, OfficialFile, Source

HOME = "http://ufldl.stanford.edu/housenumbers"
TRAIN_MD5, TEST_MD5 = "e26dedcc434d2e4c54c9b2d4a06d8373", "eb5a983be6a315427106f1b164d9cef3"


def read_mat(path: Path) -> tuple[Tensor, Tensor]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ReplearnError(
            f"{path} is a MATLAB file, and reading it needs SciPy, which is not installed (it comes with "
            "scikit-learn): pip install 'replearn[train]'."
        ) from error
    try:
        held = loadmat(path, variable_names=["X", "y"])
    except OSError:
        raise
    except Exception as error:  # SciPy fails on a broken file in any way at all
        reason = f"{type(error).__name__}: {str(error)[:80]}"
        raise ReplearnError(f"{path} is cut off or no MATLAB file of version 5 ({reason}).") from error
    if "X" not in held or "y" not in held or held["X"].ndim != 4 or held["X"].dtype != "uint8":
        raise ReplearnError(f"{path} does not hold the images X and the digits y of SVHN's cropped format.")
    labels = torch.from_numpy(held["y"].astype("int64")).flatten()
    images = torch.from_numpy(held["X"]).permute(3, 2, 0, 1).contiguous()
    return images, counted_from_one(labels, path, "SVHN") % 10


SOURCE = Source(
    name="svhn",
    title="SVHN",
    num_classes=10,
    shape=(3, 32, 32),
    num_train=73_257,
    num_test=26_032,
    layouts=(
        Layout(
            name="MATLAB",
            folders=("svhn", "SVHN", ""),
            signs=("train_32x32.mat", "test_32x32.mat"),
            files=(
                OfficialFile(name="train_32x32.mat", md5=TRAIN_MD5, split="train", num_images=73_257),
                OfficialFile(name="test_32x32.mat", md5=TEST_MD5, split="test", num_images=26_032),
            ),
            downloads=(
                Download(url=f"{HOME}/train_32x32.mat", md5=TRAIN_MD5, archive=False),
                Download(url=f"{HOME}/test_32x32.mat", md5=TEST_MD5, archive=False),
            ),
            read=read_mat,
        ),
    ),
    how=f"put {HOME}/train_32x32.mat and test_32x32.mat into the folder svhn below the root.",
)
load = partial(load_images, SOURCE)
