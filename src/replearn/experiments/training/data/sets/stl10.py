"""STL-10 (Coates, Lee, Ng 2011): 5,000 + 8,000 colour images of 96x96 in 10 classes.

The 100,000 images without labels (unlabeled_X.bin) are neither used nor asked for.
"""

from functools import partial

from ..source import Source
from ..torchvision_sets import load_images

SOURCE = Source(
    name="stl10",
    title="STL-10",
    num_classes=10,
    shape=(3, 96, 96),
    num_train=5_000,
    num_test=8_000,
    folders=("stl10_binary",),
    signs=("train_X.bin", "test_X.bin"),
    how="unpack http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz into the root.",
    torchvision="STL10",
)
load = partial(load_images, SOURCE)
