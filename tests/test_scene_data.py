"""Pictures with boxes and masks: COCO's, Cityscapes' and CamVid's layouts, and what is wrong in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from scenes import edit, write_camvid, write_cityscapes, write_coco, write_picture

from replearn import ReplearnError
from replearn.experiments import recipes
from replearn.experiments.training import data
from replearn.experiments.training.data.scenes import DetectionSet, SegmentationSet
from replearn.experiments.training.data.sets.masks import official_classes
from replearn.experiments.training.picture_batches import DetectionBatches, PictureStore
from replearn.experiments.training.processes import Processes

CPU = torch.device("cpu")


@pytest.fixture
def bccd(tmp_path: Path) -> Path:
    return write_coco(tmp_path / "bccd", {"train": 6, "test": 4})


def loaded(root: Path) -> DetectionSet:
    found = data.load("bccd", root.parent, strict_counts=False)
    assert isinstance(found, DetectionSet)
    return found


# ---- COCO ---------------------------------------------------------------------------------------


def test_coco_is_read_with_mixed_sizes_empty_pictures_and_crowds(bccd: Path) -> None:
    found = loaded(bccd)
    assert (found.category_ids, found.class_names) == ((1, 7, 90), ("red", "blue", "green"))
    assert (found.num_train, found.num_test, found.num_classes) == (6, 4, 3)
    assert {(scene.height, scene.width) for scene in found.train} == {(64, 80), (72, 64), (64, 64)}
    assert found.train[0].boxes.shape == (0, 4)
    raw = json.loads((bccd / "annotations" / "instances_train.json").read_text())
    second = [entry for entry in raw["annotations"] if entry["image_id"] == 101]
    assert [entry["iscrowd"] for entry in second] == [1, 0]
    x, y, w, h = second[1]["bbox"]
    assert found.train[1].boxes.tolist() == [[x, y, x + w, y + h]]  # the crowd is not learned
    assert found.train[1].labels.tolist() == [{1: 0, 7: 1, 90: 2}[second[1]["category_id"]]]
    assert sum(entry["iscrowd"] for entry in found.truth["annotations"]) == 1  # and is there in the test
    (image,) = found.read(found.train[1])
    middle = image[:, y + h // 2, x + w // 2]
    assert middle.argmax() == {1: 0, 7: 2, 90: 1}[second[1]["category_id"]]
    with pytest.raises(ReplearnError, match=r"holds 6 training images, and BCCD has 205"):
        data.load("bccd", bccd.parent)
    with pytest.raises(ReplearnError, match=r"COCO 2017 was not found.*cocodataset\.org"):
        data.load("coco", bccd.parent)


def test_a_box_a_pixel_over_the_edge_is_cut_and_one_without_width_is_not_learned(bccd: Path) -> None:
    def change(it: Any) -> None:
        it["annotations"][0] |= {"image_id": 102, "bbox": [-1, 5, 66, 10], "iscrowd": 0}
        it["annotations"][1] |= {"image_id": 102, "bbox": [5, 5, 0, 10]}

    edit(bccd / "annotations" / "instances_train.json", change)
    found = loaded(bccd)
    assert [0, 5, 64, 15] in found.train[2].boxes.tolist()
    assert not any(box[0] == box[2] for box in found.train[2].boxes.tolist())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda it: it["annotations"][0].update(bbox=[60, 10, 40, 20]),
            r"annotation 1 in .*instances_train\.json has the bbox \[60, 10, 40, 20\], which lies outside its "
            r"picture train_001\.png \(64x72\)\. Mend it, or take it out",
        ),
        (lambda it: it["annotations"][0].update(bbox=[1, 2, -3, 4]), r"annotation 1 .*not x, y, width, height"),
        (lambda it: it["annotations"][0].update(bbox=[1, 2, 3]), r"annotation 1 .*not x, y, width, height"),
        (
            lambda it: it["annotations"][0].update(category_id=2),
            r"annotation 1 .*has the class id 2, which is none of the 3 categories",
        ),
        (lambda it: it["annotations"][0].update(image_id=9), r"is of picture 9, which the file does not list"),
        (
            lambda it: it["images"][2].update(file_name="gone.png"),
            r"The picture .*gone\.png is missing, and .*instances_train\.json lists it",
        ),
    ],
)
def test_what_is_wrong_in_an_annotation_is_named(bccd: Path, spoil: Any, told: str) -> None:
    edit(bccd / "annotations" / "instances_train.json", spoil)
    with pytest.raises(ReplearnError, match=told):
        loaded(bccd)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "can't be read"),
        ("[1, 2]", "it holds a list and no object"),
        ('{"images": [{"id": 1, "file_name": "a", "width": 1, "height": 1}]}', "it has no list 'annotations'"),
        ('{"images": [], "annotations": [], "categories": []}', "its list 'images' is empty"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', r"images\[0\] has no file_name \(str\)"),
        (
            '{"images": [{"id": 1, "file_name": "a", "width": 1, "height": 1}], "annotations": [], '
            '"categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}',
            r"categories\[1\] has the id 1 of another",
        ),
    ],
)
def test_a_file_that_is_not_coco_s_is_refused(bccd: Path, text: str, told: str) -> None:
    (bccd / "annotations" / "instances_test.json").write_text(text)
    with pytest.raises(ReplearnError, match=rf"instances_test\.json .*{told}"):
        loaded(bccd)


def test_both_parts_must_have_the_same_categories(bccd: Path) -> None:
    edit(bccd / "annotations" / "instances_test.json", lambda it: it["categories"][0].update(name="other"))
    with pytest.raises(ReplearnError, match=r"has other categories than the training part \(3 and 3\)"):
        loaded(bccd)


# ---- broken pictures ----------------------------------------------------------------------------


def test_a_broken_picture_is_named(bccd: Path) -> None:
    (bccd / "train" / "train_003.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    found = loaded(bccd)
    with pytest.raises(ReplearnError, match=r"train_003\.png is no picture that can be read"):
        PictureStore(found.train, found.read, CPU)


def test_a_picture_of_another_size_than_its_annotation_says_is_bad(bccd: Path) -> None:
    write_picture(bccd / "train" / "train_002.png", 32, 48, [])
    found = loaded(bccd)
    with pytest.raises(ReplearnError, match=r"train_002\.png is 48x32 pixels, and its annotation says 64x64"):
        found.read(found.train[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_the_pictures_and_names_a_broken_one_in_one_line(
    bccd: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    found = loaded(bccd)
    held = PictureStore(found.train, found.read, CPU)
    monkeypatch.setattr("replearn.experiments.training.picture_batches.HELD_AT_MOST", 0)
    monkeypatch.setattr("replearn.experiments.training.picture_batches.default_workers", lambda: workers)
    streamed = PictureStore(found.train, found.read, CPU)
    rows = [[0, 3], [5, 2]]
    for one, other in zip(held.batches(rows), streamed.batches(rows), strict=True):
        assert all(torch.equal(a, b) for (a,), (b,) in zip(one, other, strict=True))
    (bccd / "train" / "train_003.png").write_bytes(b"nothing")
    with pytest.raises(ReplearnError, match=r"train_003\.png is no picture") as error:
        list(streamed.batches(rows))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("count", "world", "size"), [(5, 2, 2), (7, 3, 1), (4, 1, 3), (1, 4, 2)])
def test_every_picture_comes_once_over_all_processes(tmp_path: Path, count: int, world: int, size: int) -> None:
    write_coco(tmp_path / "bccd", {"train": 4, "test": count})
    found = loaded(tmp_path / "bccd")
    stores = [PictureStore(items, found.read, CPU) for items in (found.train, found.test)]
    recipe = replace(recipes.recipe("bccd_retinanet"), batch_size=world)
    ranks = [Processes(rank, world) for rank in range(world)]
    parts = [DetectionBatches(found, stores, rank, recipe, CPU).tested(size) for rank in ranks]
    seen = [number for part in parts for row, _ in part for number in row]
    assert sorted(seen) == list(range(count))


# ---- masks --------------------------------------------------------------------------------------


def test_camvid_is_read_and_void_does_not_count(tmp_path: Path) -> None:
    write_camvid(tmp_path / "camvid")
    found = data.load("camvid", tmp_path, strict_counts=False)
    assert isinstance(found, SegmentationSet)
    assert (found.num_train, found.num_test, found.num_classes) == (8, 3, 11)
    image, labels = found.read(found.train[0])
    assert image.shape == (3, *labels.shape)
    assert labels[-1].unique().tolist() == [255]
    assert set(labels.unique().tolist()) <= {0, 1, 2, 3, 255}
    red = (image[0] > 200) & (labels != 255)
    assert labels[red].unique().tolist() in ([1], [])
    with pytest.raises(ReplearnError, match="holds 8 training images, and CamVid has 367"):
        data.load("camvid", tmp_path)
    (tmp_path / "camvid" / "trainannot" / "003.png").unlink()
    with pytest.raises(ReplearnError, match=r"003\.png has no mask: there is no .*trainannot/003\.\*"):
        data.load("camvid", tmp_path, strict_counts=False)


def test_cityscapes_is_read_with_the_official_numbers(tmp_path: Path) -> None:
    write_cityscapes(tmp_path / "cityscapes")
    found = data.load("cityscapes", tmp_path, strict_counts=False)
    assert isinstance(found, SegmentationSet)
    assert (found.num_train, found.num_test, found.num_classes) == (4, 2, 19)
    _, labels = found.read(found.train[0])
    assert set(labels.unique().tolist()) <= {0, 10, 11, 13, 255}  # road, sky, person, car, void
    assert labels[-1].unique().tolist() == [255]
    assert [found.class_names[n] for n in (0, 10, 11, 13, 18)] == ["road", "sky", "person", "car", "bicycle"]
    numbers = official_classes()[1].tolist()
    trained = [label for label, number in enumerate(numbers) if 0 <= number < 19]
    assert trained == [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    assert [numbers[label] for label in trained] == list(range(19))
    assert numbers[0] == numbers[29] == numbers[255] == 255
    assert numbers[34] == -1
    next((tmp_path / "cityscapes" / "gtFine" / "val").glob("*/*")).unlink()
    with pytest.raises(ReplearnError, match=r"_leftImg8bit\.png has no mask: there is no .*_gtFine_labelIds\.png"):
        data.load("cityscapes", tmp_path, strict_counts=False)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda path: write_picture(path, 60, 80, [], (), 0),
            r"The mask .*002\.png is 80x60 pixels, and its picture .*002\.png is 80x64",
        ),
        (
            lambda path: write_picture(path, 64, 80, [], (), 17),
            r"The mask .*002\.png holds the class id 17, which camvid has not: it has 11 classes",
        ),
        (
            lambda path: Image.new("RGB", (80, 64), (1, 2, 3)).save(path),
            r"The mask .*002\.png is a colour picture",
        ),
        (lambda path: path.write_bytes(b"GIF"), r"002\.png is no picture that can be read"),
        (
            lambda path: Image.new("I;16", (80, 64), 1).save(path),
            r"The mask .*002\.png has pixels of 'I;16'; it has to hold 8 bits",
        ),
        (lambda path: Image.new("1", (80, 64), 1).save(path), r"The mask .*002\.png has pixels of '1'"),
    ],
)
def test_what_is_wrong_in_a_mask_is_named(tmp_path: Path, spoil: Any, told: str) -> None:
    write_camvid(tmp_path / "camvid")
    spoil(tmp_path / "camvid" / "trainannot" / "002.png")
    found = data.load("camvid", tmp_path, strict_counts=False)
    assert isinstance(found, SegmentationSet)
    with pytest.raises(ReplearnError, match=told):
        PictureStore(found.train, found.read, CPU)


def test_masks_with_a_palette_or_three_equal_channels_are_read(tmp_path: Path) -> None:
    write_camvid(tmp_path / "camvid")
    path = tmp_path / "camvid" / "trainannot" / "001.png"
    found = data.load("camvid", tmp_path, strict_counts=False)
    assert isinstance(found, SegmentationSet)
    _, before = found.read(found.train[1])
    grey = Image.open(path)
    grey.load()
    grey.convert("RGB").save(path)
    assert torch.equal(found.read(found.train[1])[1], before)
    palette = Image.frombytes("P", grey.size, grey.tobytes())
    palette.putpalette([7] * 768)
    palette.save(path)
    assert torch.equal(found.read(found.train[1])[1], before)
