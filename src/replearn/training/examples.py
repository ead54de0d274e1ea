"""Pictures with what is in them and what a run found there, as PNG files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ReplearnError

FOLDER = "examples"
SURE = 0.4  # boxes with a lower score are not drawn
COLOURS = (
    *((230, 60, 60), (60, 130, 230), (60, 180, 75), (245, 160, 30), (150, 70, 200), (40, 190, 190)),
    *((240, 90, 180), (160, 200, 50), (120, 90, 50), (250, 220, 60), (90, 90, 110), (180, 140, 220)),
    *(
        (20, 110, 90),
        (200, 110, 90),
        (100, 160, 250),
        (130, 130, 40),
        (220, 190, 170),
        (60, 60, 180),
        (170, 30, 90),
    ),
)


def box_examples(
    out: Path,
    shown: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
    found: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
) -> None:
    """Each picture twice: with its own boxes, and with those that were found."""
    for place, ((image, truth), said) in enumerate(zip(shown, found, strict=True)):
        save(out, place, "truth", with_boxes(image, truth, names))
        sure = said["scores"] >= SURE
        save(out, place, "found", with_boxes(image, {key: value[sure] for key, value in said.items()}, names))


def mask_examples(out: Path, shown: Sequence[tuple[Tensor, Tensor]], said: Sequence[Tensor]) -> None:
    """Each picture twice: under its own classes, and under those that were said."""
    for place, ((image, truth), labels) in enumerate(zip(shown, said, strict=True)):
        save(out, place, "truth", with_mask(image, truth))
        save(out, place, "found", with_mask(image, labels))


def with_boxes(image: Tensor, boxes: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """The picture (0 to 1) with named boxes."""
    from PIL import ImageDraw

    picture = as_picture(image)
    pen = ImageDraw.Draw(picture)
    scores = boxes["scores"].tolist() if "scores" in boxes else [None] * len(boxes["labels"])
    for box, label, score in zip(boxes["boxes"].tolist(), boxes["labels"].tolist(), scores, strict=True):
        colour = COLOURS[label % len(COLOURS)]
        pen.rectangle(box, outline=colour, width=2)
        text = names[label] if score is None else f"{names[label]} {score:.2f}"
        place = (box[0] + 3, max(0.0, box[1] + 1))
        pen.rectangle(pen.textbbox(place, text), fill=(0, 0, 0))
        pen.text(place, text, fill=colour)
    return picture


def with_mask(image: Tensor, labels: Tensor) -> Any:
    """The picture (0 to 1) under its classes' colours; where no class counts it is left as it is."""
    palette = torch.tensor(COLOURS, dtype=torch.float32, device=image.device) / 255
    colours = palette[labels.clamp(min=0) % len(COLOURS)].permute(2, 0, 1)
    return as_picture(torch.where(labels >= 0, 0.45 * image + 0.55 * colours, image))


def as_picture(image: Tensor) -> Any:
    from PIL import Image

    pixels = (
        image.detach().float().clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu().contiguous()
    )
    return Image.fromarray(pixels.numpy())


def save(out: Path, place: int, which: str, picture: Any) -> None:
    folder = out / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / f"{place}-{which}.png")
    except OSError as error:
        raise ReplearnError(f"Can't write the picture {folder / f'{place}-{which}.png'}: {error}.") from error
