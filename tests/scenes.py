"""A dozen made-up pictures in the layouts of COCO, Cityscapes and CamVid: coloured squares on grey."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from replearn.experiments.training import data

IDS = (1, 7, 90)  # of COCO's classes
COLOURS = ((220, 40, 40), (40, 60, 220), (40, 200, 60))


def square(generator: torch.Generator, height: int, width: int) -> tuple[int, int, int, int, int]:
    """A class, and where its square lies: x, y, width, height."""

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    side = whole(18, 30)
    return whole(0, 3), whole(0, width - side), whole(0, height - side), side, side


def write_picture(
    path: Path, height: int, width: int, squares: Any, values: Any = COLOURS, ground: Any = (120, 120, 120)
) -> None:
    """A colour picture; a mask, where the values are numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("L" if isinstance(ground, int) else "RGB", (width, height), ground)
    for label, x, y, w, h in squares:
        picture.paste(values[label], (x, y, x + w, y + h))
    picture.save(path)


def write_coco(folder: Path, parts: dict[str, int]) -> Path:
    """Pictures of mixed sizes with one or two squares; the first is empty, and in the second lies a crowd."""
    for seed, (part, count) in enumerate(parts.items()):
        generator = torch.Generator().manual_seed(seed)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            height, width = ((64, 80), (72, 64), (64, 64))[number % 3]
            squares = [] if number == 0 else [square(generator, height, width) for _ in range(1 + number % 2)]
            name = f"{part}_{number:03}.png"
            write_picture(folder / part / name, height, width, squares)
            images.append({"id": 100 + number, "file_name": name, "height": height, "width": width})
            for label, x, y, w, h in squares:
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": 100 + number,
                        "category_id": IDS[label],
                        "bbox": [x, y, w, h],
                        "area": w * h,
                        "iscrowd": int(number == 1 and (label, x, y, w, h) == squares[0]),
                    }
                )
        categories = [
            {"id": number, "name": name} for number, name in zip(IDS, ("red", "blue", "green"), strict=True)
        ]
        data = {"images": images, "annotations": annotations, "categories": categories}
        file = folder / "annotations" / f"instances_{part}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data))
    return folder


@contextmanager
def any_count() -> Iterator[None]:
    """Inside, recipes train on as many pictures as there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "check_counts", lambda *about: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_pictures() -> Iterator[None]:
    with any_count():
        yield


def edit(file: Path, change: Any) -> None:
    """Read an annotation file, change it, and write it back."""
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


def write_camvid(folder: Path, train: int = 8, test: int = 3, mixed: bool = False) -> Path:
    """Squares of the classes 1 to 3 on class 0, with a strip of void at the bottom."""
    for seed, (part, count) in enumerate((("train", train), ("test", test))):
        generator = torch.Generator().manual_seed(seed)
        for number in range(count):
            height, width = (72, 64) if mixed and number % 2 else (64, 80)
            squares = [square(generator, height, width) for _ in range(2)]
            write_picture(folder / part / f"{number:03}.png", height, width, squares)
            strip = (3, 0, height - 4, width, 4)  # painted last, with the value of void
            mask = folder / f"{part}annot" / f"{number:03}.png"
            write_picture(mask, height, width, [*squares, strip], (1, 2, 3, 11), 0)
    return folder


def write_cityscapes(folder: Path) -> Path:
    """Squares of person, car and sky (24, 26, 23) on road (7), with a strip that is not trained (1)."""
    for seed, (part, count) in enumerate((("train", 4), ("val", 2))):
        generator = torch.Generator().manual_seed(seed)
        for number in range(count):
            city = ("aachen", "ulm")[number % 2]
            name = f"{city}_{number:06}_000019"
            squares = [square(generator, 64, 128) for _ in range(2)]
            write_picture(folder / "leftImg8bit" / part / city / f"{name}_leftImg8bit.png", 64, 128, squares)
            mask = folder / "gtFine" / part / city / f"{name}_gtFine_labelIds.png"
            write_picture(mask, 64, 128, [*squares, (3, 0, 60, 128, 4)], (24, 26, 23, 1), 7)
    return folder
