"""COCO, and others in its layout: a JSON file of pictures, boxes and categories for each part, and a folder."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .....errors import ReplearnError
from ..scenes import DetectionSet, Scene
from ..source import Root, Source, locate

TOLERANCE = 2.0  # pixels that a box may stick out by, and is cut: the official files round so
FIELDS = {
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "annotations": {"id": int, "image_id": int, "category_id": int, "bbox": list},
    "categories": {"id": int, "name": str},
}


def read_annotations(path: Path) -> dict[str, Any]:
    """COCO's data of one part; ReplearnError for a file that is not in COCO's format."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReplearnError(f"The annotation file {path} can't be read: {error}.") from error
    if problem := not_coco(data):
        raise ReplearnError(
            f"{path} is not a COCO annotation file: {problem}. It has to hold the lists images (id, file_name, "
            "width, height), annotations (id, image_id, category_id, bbox) and categories (id, name)."
        )
    return dict(data)


def not_coco(data: Any) -> str:
    """What keeps this from being COCO's data; '' if nothing does."""
    if not isinstance(data, dict):
        return f"it holds a {type(data).__name__} and no object"
    for part, fields in FIELDS.items():
        entries = data.get(part)
        if not isinstance(entries, list):
            return f"it has no list {part!r}"
        if not entries and part != "annotations":
            return f"its list {part!r} is empty"
        seen = set()
        for place, entry in enumerate(entries):
            for name, kind in fields.items():
                if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
                    return f"{part}[{place}] has no {name} ({kind.__name__})"
            if entry["id"] in seen:
                return f"{part}[{place}] has the id {entry['id']} of another"
            seen.add(entry["id"])
    return ""


def read_part(path: Path, pictures: Path) -> tuple[tuple[Scene, ...], dict[str, Any]]:
    """The scenes of a part, and its COCO data with categories in the order of ids.

    Crowds are in the COCO data alone: they are not learned, and in tests nothing is held against a box there.
    Boxes without width or height, which the official files have, teach nothing and are left out in training.
    """
    data = read_annotations(path)
    categories = sorted(({"id": c["id"], "name": c["name"]} for c in data["categories"]), key=lambda c: c["id"])
    labels = {category["id"]: label for label, category in enumerate(categories)}
    known = {entry["id"]: entry for entry in data["images"]}
    for entry in known.values():
        if not (pictures / entry["file_name"]).is_file():  # what is in it is seen when it is read
            raise ReplearnError(f"The picture {pictures / entry['file_name']} is missing, and {path} lists it.")
    boxes: dict[int, list[tuple[list[float], int]]] = {number: [] for number in known}
    for entry in data["annotations"]:
        number = entry["image_id"]
        if problem := wrong(entry, known.get(number), labels):
            raise ReplearnError(f"annotation {entry['id']} in {path} {problem}. Mend it, or take it out.")
        box = corners(entry, known[number])
        if not entry.get("iscrowd") and box[2] > box[0] and box[3] > box[1]:
            boxes[number].append((box, labels[entry["category_id"]]))
    scenes = tuple(
        Scene(
            number,
            pictures / known[number]["file_name"],
            known[number]["height"],
            known[number]["width"],
            torch.tensor([box for box, _ in found], dtype=torch.float32).reshape(-1, 4),
            torch.tensor([label for _, label in found], dtype=torch.int64),
        )
        for number, found in boxes.items()
    )
    truth = [as_truth(entry) for entry in data["annotations"]]
    return scenes, {"images": [{"id": n} for n in boxes], "annotations": truth, "categories": categories}


def wrong(entry: Mapping[str, Any], image: Mapping[str, Any] | None, labels: Mapping[int, int]) -> str:
    """What is wrong with an annotation; '' if nothing is."""
    if image is None:
        return f"is of picture {entry['image_id']}, which the file does not list"
    if entry["category_id"] not in labels:
        return f"has the class id {entry['category_id']}, which is none of the {len(labels)} categories"
    box = entry["bbox"]
    if len(box) != 4 or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in box) or min(box[2:]) < 0:
        return f"has the bbox {box}, which is not x, y, width, height"
    width, height = image["width"] + TOLERANCE, image["height"] + TOLERANCE
    if min(box[:2]) < -TOLERANCE or box[0] + box[2] > width or box[1] + box[3] > height:
        size = f"{image['width']}x{image['height']}"
        return f"has the bbox {box}, which lies outside its picture {image['file_name']} ({size})"
    return ""


def corners(entry: Mapping[str, Any], image: Mapping[str, Any]) -> list[float]:
    """A box as corners, cut to its picture."""
    x, y, width, height = entry["bbox"]
    right, bottom = min(x + width, float(image["width"])), min(y + height, float(image["height"]))
    return [max(x, 0.0), max(y, 0.0), right, bottom]


def as_truth(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation reads of an annotation."""
    box = entry["bbox"]
    return {
        **{name: entry[name] for name in ("id", "image_id", "category_id", "bbox")},
        "area": entry.get("area", box[2] * box[3]),
        "iscrowd": int(bool(entry.get("iscrowd", 0))),
    }


def load_parts(source: Source, root: Root = None) -> DetectionSet:
    """The data set; ReplearnError for a wrong box or a missing picture."""
    folder = locate(source, root)
    files = [folder / pattern for pattern in source.patterns]
    (train, about), (test, truth) = (
        read_part(file, folder / file.stem.removeprefix("instances_")) for file in files
    )
    categories = truth["categories"]
    if about["categories"] != categories:
        raise ReplearnError(
            f"{files[1]} has other categories than the training part ({len(categories)} and "
            f"{len(about['categories'])}); both must list the same ids and names."
        )
    names, ids = (tuple(category[key] for category in categories) for key in ("name", "id"))
    return DetectionSet(name=source.name, class_names=names, category_ids=ids, train=train, test=test, truth=truth)


# COCO 2017 (Lin et al. 2014). Tested on val2017, as everywhere: the official test part's boxes are not given out.
COCO = Source(
    name="coco",
    title="COCO 2017",
    load=load_parts,
    num_classes=80,
    shape=(3, 480, 640),
    num_train=118_287,
    num_test=5_000,
    folders=("coco", "coco2017", "COCO"),
    patterns=("annotations/instances_train2017.json", "annotations/instances_val2017.json"),
    how=(
        "Get train2017.zip, val2017.zip and annotations_trainval2017.zip from cocodataset.org and unpack them "
        "into ROOT/coco."
    ),
)
BCCD = Source(  # blood cells under a microscope: red and white cells, platelets; MIT
    name="bccd",
    title="BCCD",
    load=load_parts,
    num_classes=3,
    shape=(3, 480, 640),
    num_train=205,
    num_test=72,
    folders=("bccd",),
    patterns=("annotations/instances_train.json", "annotations/instances_test.json"),
    how=(
        "Put annotations/instances_{train,test}.json (COCO's format) and the pictures, in folders train and test, "
        "into ROOT/bccd."
    ),
)
