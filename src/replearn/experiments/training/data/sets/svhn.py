"""SVHN (Netzer et al. 2011), cropped digits: 73,257 + 26,032 colour images of 32x32 in 10 classes.

The extra training images (extra_32x32.mat) are not used.
"""

from functools import partial

from ..source import Source
from ..torchvision_sets import load_images

HOME = "http://ufldl.stanford.edu/housenumbers"

SOURCE = Source(
    name="svhn",
    title="SVHN",
    num_classes=10,
    shape=(3, 32, 32),
    num_train=73_257,
    num_test=26_032,
    folders=("svhn", "SVHN", ""),
    signs=("train_32x32.mat", "test_32x32.mat"),
    how=f"put {HOME}/train_32x32.mat and test_32x32.mat into the folder svhn below the root.",
    torchvision="SVHN",
)
load = partial(load_images, SOURCE)
