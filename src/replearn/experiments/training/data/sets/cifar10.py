"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32x32 in 10 classes. The python version."""

from functools import partial

from ..source import Source
from ..torchvision_sets import load_images

SOURCE = Source(
    name="cifar10",
    title="CIFAR-10",
    num_classes=10,
    shape=(3, 32, 32),
    num_train=50_000,
    num_test=10_000,
    folders=("cifar-10-batches-py",),
    signs=("*_batch*",),
    how="unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz into the root.",
    torchvision="CIFAR10",
    splits=(True, False),
)
load = partial(load_images, SOURCE)
