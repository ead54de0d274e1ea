"""CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32 in 100 fine classes. The python version."""

from dataclasses import replace
from functools import partial

from ..torchvision_sets import load_images
from .cifar10 import SOURCE as CIFAR10

SOURCE = replace(
    CIFAR10,
    name="cifar100",
    title="CIFAR-100",
    num_classes=100,
    folders=("cifar-100-python",),
    signs=("train", "test"),
    how="unpack https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz into the root.",
    torchvision="CIFAR100",
)
load = partial(load_images, SOURCE)
