"""ImageNet-like streams: class folders, the same batches however many processes read them."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from replearn.errors import ReplearnError
from replearn.experiments.training import data
from replearn.experiments.training.data import StreamedSet
from replearn.experiments.training.image_batches import StreamBatches
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.recipe import Augment

CLASSES = ("n01", "n02", "n03")
TRAIN, TEST = 14, 7


def jpeg(number: int) -> bytes:
    """Red tells which picture it is, green which part of it was taken."""
    stream = io.BytesIO()
    width = 40 + number
    red, blue = Image.new("L", (width, 32), number * 10), Image.new("L", (width, 32), 99)
    green = Image.linear_gradient("L").rotate(60).resize((width, 32))
    Image.merge("RGB", (red, green, blue)).save(stream, "JPEG", quality=98, subsampling=0)
    return stream.getvalue()


def numbers(images: torch.Tensor) -> list[int]:
    """Which pictures these are, by their red."""
    return [round(float(image[0].float().mean()) / 10) for image in images]


def write_folders(root: Path) -> None:
    for split, count in (("train", TRAIN), ("val", TEST)):
        for number in range(count):
            folder = root / "imagenet" / split / CLASSES[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:03}.JPEG").write_bytes(jpeg(number))
    (root / "imagenet" / "train" / "n01" / ".DS_Store").write_bytes(b"rubbish")
    (root / "imagenet" / "train" / "n01" / "list.txt").write_text("not a picture")


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    write_folders(root / "folders")
    return root


@pytest.fixture
def stream(originals) -> StreamedSet:
    stream = data.load("imagenet", originals / "folders", strict_counts=False)
    assert isinstance(stream, StreamedSet)
    return plain(stream, size=16)


def plain(stream: StreamedSet, **changes) -> StreamedSet:
    """Read in this process, and not normalised: values stay those of the files, from 0 to 255."""
    return replace(stream, **{"workers": 0, "mean": (0.0,) * 3, "std": (1 / 255,) * 3} | changes)


def batches_of(
    stream: StreamedSet, batch_size: int = 4, rank: int = 0, world: int = 1, **augment
) -> StreamBatches:
    return StreamBatches(stream, Augment(**augment), Processes(rank, world), batch_size, torch.device("cpu"))


def drawn(stream: StreamedSet, epoch: int, seed: int, batch_size: int = 4, first: int = 0, **how) -> list:
    """An epoch's batches, from one on."""
    batches = batches_of(stream, batch_size, **how)
    batches.start_epoch(seed, epoch, first)
    made = []
    for step in range(first, batches.steps):
        batches.advance(step)
        made.append(batches.current())
    return made


def evaluated(stream: StreamedSet, batch_size: int = 4, rank: int = 0, world: int = 1) -> list:
    return list(batches_of(stream, batch_size, rank, world).test())


def same(left: list, right: list) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(left, right, strict=True)
    )


# ---- what every stream keeps -----------------------------------------------------------------


def test_batches_have_the_right_labels(stream):
    for images, labels in [*drawn(stream, 0, 0), *evaluated(stream)]:
        assert (images.shape[1:], images.dtype, labels.dtype) == ((3, 16, 16), torch.float32, torch.int64)
        assert [number % 3 for number in numbers(images)] == labels.tolist()


def test_an_epoch_draws_each_image_at_most_once_and_leaves_out_a_short_batch(stream):
    batches = drawn(stream, 0, 0)
    assert [len(labels) for _, labels in batches] == [4, 4, 4]
    counted = Counter(number for images, _ in batches for number in numbers(images))
    assert max(counted.values()) == 1


def test_each_epoch_crops_the_same_picture_anew(stream):
    def by_number(epoch: int) -> dict[int, torch.Tensor]:
        ((images, _),) = drawn(stream, epoch, 0, batch_size=TRAIN)
        return dict(zip(numbers(images), images[:, 1], strict=True))

    first, second = by_number(0), by_number(1)
    assert len(first) == TRAIN
    assert sum(torch.equal(first[number], second[number]) for number in first) < 2


def test_the_same_seed_and_epoch_give_the_same_batches_and_others_do_not(stream):
    first = drawn(stream, 1, 7)
    assert same(first, drawn(stream, 1, 7))
    for epoch, seed in ((2, 7), (1, 8)):
        assert not same(first, drawn(stream, epoch, seed))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_goes_on_with_the_very_next_batch(stream, workers):
    stream = replace(stream, workers=workers)
    whole = drawn(stream, 3, 0, batch_size=2)
    for first in (1, 4, len(whole)):
        assert same(whole[first:], drawn(stream, 3, 0, batch_size=2, first=first))


def test_reading_data_leaves_the_global_random_numbers_alone(stream):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn(stream, 0, 0)
    evaluated(replace(stream, workers=1))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("world", "per_process"), [(w, n) for w in (1, 2, 3, 5) for n in (1, 2, 4) if w * n <= TRAIN]
)
def test_every_test_image_is_seen_once_over_all_processes(stream, world, per_process):
    parts = [evaluated(stream, per_process * world, rank, world) for rank in range(world)]
    assert sorted(number for part in parts for images, _ in part for number in numbers(images)) == list(
        range(TEST)
    )


def test_batches_that_can_t_be_shared_out_are_told(stream):
    with pytest.raises(ReplearnError, match="A batch of 5 can't be divided among 2 processes"):
        batches_of(stream, 5, world=2)
    with pytest.raises(ReplearnError, match="A batch of 16 is larger than imagenet, which has 14 training images"):
        batches_of(stream, 16)


def test_pictures_are_picked_without_augmentation(stream):
    images, labels = batches_of(stream).picked(True, torch.tensor([3, 0, 3]))
    assert [number % 3 for number in numbers(images)] == labels.tolist()
    assert torch.equal(images[0], images[2])


def test_the_validation_picture_is_the_centre_of_the_resized_one(tmp_path, originals):
    shutil.copytree(originals / "folders", tmp_path, dirs_exist_ok=True)
    framed = Image.new("RGB", (512, 512), (255, 255, 255))
    framed.paste((0, 0, 0), (32, 32, 480, 480))  # the frame is what 256 -> 224 cuts away
    framed.save(tmp_path / "imagenet" / "val" / "n01" / "000.JPEG", quality=100)
    stream = plain(data.load("imagenet", tmp_path, strict_counts=False))
    images, _ = evaluated(stream, batch_size=1)[0]
    assert images.shape == (1, 3, 224, 224)
    assert int(images[..., 2:-2, 2:-2].max()) < 10
    smaller = evaluated(replace(stream, size=112), batch_size=1)[0][0]
    assert int(smaller[..., 2:-2, 2:-2].max()) < 10


# ---- class folders ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_processes_together_read_the_batches_of_one(stream, world):
    alone = drawn(stream, 2, 1)
    parts = [drawn(stream, 2, 1, rank=rank, world=world) for rank in range(world)]
    together = [
        (torch.cat([images for images, _ in step]), torch.cat([labels for _, labels in step]))
        for step in zip(*parts, strict=True)
    ]
    assert same(alone, together)


def test_the_number_of_workers_changes_nothing(stream):
    assert same(drawn(stream, 0, 0), drawn(replace(stream, workers=2), 0, 0))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_named_in_one_line(originals, tmp_path, workers):
    shutil.copytree(originals / "folders", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "imagenet" / "train" / "n02" / "004.JPEG"
    path.write_bytes(path.read_bytes()[:400])
    stream = replace(data.load("imagenet", tmp_path, strict_counts=False), size=16, workers=workers)
    with pytest.raises(ReplearnError, match=r"n02/004\.JPEG is no picture that can be read") as error:
        drawn(stream, 0, 0, batch_size=14)
    assert len(str(error.value).splitlines()) == 1


def test_a_picture_that_vanished_is_named(originals, tmp_path):
    shutil.copytree(originals / "folders", tmp_path, dirs_exist_ok=True)
    stream = replace(data.load("imagenet", tmp_path, strict_counts=False), size=16, workers=0)
    (tmp_path / "imagenet" / "val" / "n03" / "002.JPEG").unlink()
    with pytest.raises(ReplearnError, match=r"n03/002\.JPEG"):
        evaluated(stream)


def test_folders_that_are_not_imagenet_are_told(originals, tmp_path):
    shutil.copytree(originals / "folders", tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "imagenet"
    with pytest.raises(ReplearnError, match="holds 3 classes, and ImageNet has 1,000"):
        data.load("imagenet", tmp_path)
    for path in (folder / "val" / "n03").iterdir():
        path.unlink()
    with pytest.raises(ReplearnError, match="no valid file for the classes n03"):
        data.load("imagenet", tmp_path, strict_counts=False)
    (folder / "val" / "n03").rmdir()
    with pytest.raises(ReplearnError, match=r"The class n03 is only in .*train"):
        data.load("imagenet", tmp_path, strict_counts=False)
    shutil.rmtree(folder / "val")
    (folder / "val").mkdir()
    (folder / "val" / "ILSVRC2012_val_00000001.JPEG").write_bytes(jpeg(1))
    with pytest.raises(ReplearnError, match="must be sorted into folders"):
        data.load("imagenet", tmp_path, strict_counts=False)
    assert "sorted into folders" in str(data.status("imagenet", tmp_path).problem)
