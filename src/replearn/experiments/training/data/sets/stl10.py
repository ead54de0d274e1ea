"""STL-10 (Coates, Lee, Ng 2011): 5,000 + 8,000 colour images of 96x96 in 10 classes.

Binary version: `*_X.bin` holds three planes an image, each column by column; `*_y.bin` one byte an
image, from 1 to 10. The 100,000 images without labels are not used.
"""

from functools import partial
from pathlib import Path

from torch import Tensor

from ..images import counted_from_one, load_images, records_of
from ..source import Download, Layout, OfficialFile, Source

ADDRESS = "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz"


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    planes = records_of(path, 3 * 96 * 96).reshape(-1, 3, 96, 96)
    beside = path.with_name(path.name.replace("_X", "_y"))
    labels = counted_from_one(records_of(beside, 1).flatten().long(), beside, "STL-10")
    return planes.transpose(2, 3).contiguous(), labels - 1


SOURCE = Source(
    name="stl10",
    title="STL-10",
    num_classes=10,
    shape=(3, 96, 96),
    num_train=5_000,
    num_test=8_000,
    layouts=(
        Layout(
            name="binary",
            folders=("stl10_binary",),
            signs=("train_X.bin", "test_X.bin"),
            files=(
                OfficialFile(
                    name="train_X.bin", md5="918c2871b30a85fa023e0c44e0bee87f", split="train", num_images=5_000
                ),
                OfficialFile(name="train_y.bin", md5="5a34089d4802c674881badbb80307741"),
                OfficialFile(
                    name="test_X.bin", md5="7f263ba9f9e0b06b93213547f721ac82", split="test", num_images=8_000
                ),
                OfficialFile(name="test_y.bin", md5="36f9794fa4beb8a2c72628de14fa638e"),
            ),
            downloads=(Download(url=ADDRESS, md5="91f7769df0f17e558f3565bffb0c7dfb"),),
            read=read_binary,
        ),
    ),
    how=f"unpack {ADDRESS} into the root.",
)
load = partial(load_images, SOURCE)
