"""COCO's layout: one JSON file of pictures, boxes and categories for each part, and a folder of pictures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....errors import ReplearnError
from .places import locate
from .scenes import Defects, DetectionSet, Scene
from .source import Source

TOLERANCE = 2.0  # pixels that a box may stick out by, and is cut: the official files round so
Categories = tuple[tuple[int, str], ...]
FIELDS = {
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "annotations": {"id": int, "image_id": int, "category_id": int, "bbox": list},
    "categories": {"id": int, "name": str},
}


def read_annotations(path: Path) -> dict[str, Any]:
    """COCO's data of one part; ReplearnError, whatever the policy, for a file that is not in COCO's format."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReplearnError(f"The annotation file {path} can't be read: {error}.") from error
    problem = not_coco(data)
    if problem:
        raise ReplearnError(
            f"{path} is not a COCO annotation file: {problem}. It has to hold the lists images (id, file_name, "
            "width, height), annotations (id, image_id, category_id, bbox) and categories (id, name)."
        )
    found: dict[str, Any] = data
    return found


def not_coco(data: Any) -> str:
    """What keeps this from being COCO's data; '' if nothing does."""
    if not isinstance(data, dict):
        return f"it holds a {type(data).__name__} and no object"
    for part, fields in FIELDS.items():
        entries = data.get(part)
        if not isinstance(entries, list):
            return f"it has no list {part!r}"
        seen = set()
        for place, entry in enumerate(entries):
            for name, kind in fields.items():
                if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
                    return f"{part}[{place}] has no {name} ({kind.__name__})"
            if entry["id"] in seen:
                return f"{part}[{place}] has the id {entry['id']} of another"
            seen.add(entry["id"])
    for part in ("images", "categories"):
        if not data[part]:
            return f"its list {part!r} is empty"
    return ""


def read_part(
    path: Path, pictures: Path, defects: Defects, categories: Categories | None = None
) -> tuple[tuple[Scene, ...], Mapping[str, Any], Categories]:
    """The scenes of a part, its COCO data without what was left out, and its categories in the order of ids.

    Crowds are in the COCO data alone: they are not learned, and in tests nothing is held against a box there.
    Boxes without width or height, which the official files have, teach nothing and are left out in training.
    """
    data = read_annotations(path)
    found = tuple(sorted((int(entry["id"]), str(entry["name"])) for entry in data["categories"]))
    if categories is not None and found != categories:
        raise ReplearnError(
            f"{path} has other categories than the training part ({len(found)} and {len(categories)}); both must "
            "list the same ids and names."
        )
    labels = {number: label for label, (number, _) in enumerate(found)}
    images = {
        entry["id"]: entry for entry in data["images"] if there(pictures / entry["file_name"], path, defects)
    }
    known = {entry["id"] for entry in data["images"]}
    boxes: dict[int, list[list[float]]] = {number: [] for number in images}
    classes: dict[int, list[int]] = {number: [] for number in images}
    kept = []
    for entry in data["annotations"]:
        place = f"annotation {entry['id']} in {path}"
        if entry["image_id"] not in known:
            defects.report(f"{place} is of picture {entry['image_id']}, which the file does not list.")
            continue
        if entry["image_id"] not in images:
            continue  # its picture was reported
        if entry["category_id"] not in labels:
            defects.report(
                f"{place} has the class id {entry['category_id']}, which is none of the {len(labels)} categories."
            )
            continue
        box = corners(entry, images[entry["image_id"]], place, defects)
        if box is None:
            continue
        kept.append(as_truth(entry))
        if not entry.get("iscrowd") and box[2] > box[0] and box[3] > box[1]:
            boxes[entry["image_id"]].append(box)
            classes[entry["image_id"]].append(labels[entry["category_id"]])
    scenes = tuple(
        Scene(
            number,
            pictures / entry["file_name"],
            entry["height"],
            entry["width"],
            torch.tensor(boxes[number], dtype=torch.float32).reshape(-1, 4),
            torch.tensor(classes[number], dtype=torch.int64),
        )
        for number, entry in images.items()
    )
    names = [{"id": number, "name": name} for number, name in found]
    truth = {"images": [{"id": number} for number in images], "annotations": kept, "categories": names}
    return scenes, truth, found


def there(file: Path, annotations: Path, defects: Defects) -> bool:
    """Whether a picture's file exists; what is in it is seen when it is read."""
    if file.is_file():
        return True
    defects.report(f"The picture {file} is missing, and {annotations} lists it.")
    return False


def corners(
    entry: Mapping[str, Any], image: Mapping[str, Any], place: str, defects: Defects
) -> list[float] | None:
    """A box as corners, cut to its picture; None, and reported, where it is no box or not in the picture."""
    box = entry["bbox"]
    if len(box) != 4 or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in box) or min(box[2:]) < 0:
        defects.report(f"{place} has the bbox {box}, which is not x, y, width, height.")
        return None
    x0, y0, x1, y1 = box[0], box[1], box[0] + box[2], box[1] + box[3]
    width, height = image["width"], image["height"]
    if min(x0, y0) < -TOLERANCE or x1 > width + TOLERANCE or y1 > height + TOLERANCE:
        defects.report(
            f"{place} has the bbox {box}, which lies outside its picture {image['file_name']} ({width}x{height})."
        )
        return None
    return [max(x0, 0.0), max(y0, 0.0), min(x1, float(width)), min(y1, float(height))]


def as_truth(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation reads of an annotation."""
    box = entry["bbox"]
    return {
        "id": entry["id"],
        "image_id": entry["image_id"],
        "category_id": entry["category_id"],
        "bbox": box,
        "area": entry.get("area", box[2] * box[3]),
        "iscrowd": int(bool(entry.get("iscrowd", 0))),
    }


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which parts of a data set are trained on and tested on."""

    train: str
    test: str

    @property
    def signs(self) -> tuple[str, ...]:
        return tuple(f"annotations/instances_{part}.json" for part in (self.train, self.test))


COCO_2017 = Parts(train="train2017", test="val2017")


def load_parts(
    source: Source,
    parts: Parts,
    root: str | os.PathLike[str] | None,
    strict_counts: bool = True,
    defects: Defects | None = None,
) -> DetectionSet:
    """The data set; `defects` says whether a wrong box or a missing picture ends it or is left out."""
    folder, _ = locate(source, root)
    defects = defects if defects is not None else Defects()
    file = folder / "annotations" / "instances_{}.json"
    train, _, categories = read_part(file.with_name(file.name.format(parts.train)), folder / parts.train, defects)
    test, truth, _ = read_part(
        file.with_name(file.name.format(parts.test)), folder / parts.test, defects, categories
    )
    expected = (("training", len(train), source.num_train), ("test", len(test), source.num_test))
    for which, found, right in expected:
        if strict_counts and defects.policy == "refuse" and found != right:
            raise ReplearnError(
                f"{folder} lists {found:,} {which} pictures, and {source.title} has {right:,}. {source.how}"
            )
    return DetectionSet(name=source.name, categories=categories, train=train, test=test, truth=truth)
