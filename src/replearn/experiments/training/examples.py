"""Pictures with what is in them and what a run found there, as PNG files in the run's folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ReplearnError

FOLDER = "examples"
LEGEND, LEGEND_WIDTH, LINE = "legend.png", 640, 20  # as wide as the narrowest sheet
SURE = 0.4  # boxes with a lower score are not drawn
COLOURS = (
    *((230, 60, 60), (60, 130, 230), (60, 180, 75), (245, 160, 30), (150, 70, 200), (40, 190, 190)),
    *((240, 90, 180), (160, 200, 50), (120, 90, 50), (250, 220, 60), (90, 90, 110), (180, 140, 220)),
    *((20, 110, 90), (200, 110, 90), (100, 160, 250), (130, 130, 40), (220, 190, 170), (60, 60, 180)),
    (170, 30, 90),
)


def write_examples(out: Path, shown: Sequence[tuple[Tensor, Any, Any]], names: Sequence[str]) -> None:
    """Each picture (0 to 1) twice: with what is in it, and with what was found; boxes, or a class a pixel."""
    from PIL import Image

    folder = out / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place, (image, *sides) in enumerate(shown):
            for side, what in zip(("truth", "found"), sides, strict=True):
                drawn = with_mask(image, what) if isinstance(what, Tensor) else image
                pixels = drawn.detach().float().clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0)
                picture = Image.fromarray(pixels.cpu().contiguous().numpy())
                if not isinstance(what, Tensor):
                    draw_boxes(picture, what, names)
                picture.save(folder / f"{place}-{side}.png")
        legend(names).save(folder / LEGEND)
    except OSError as error:
        raise ReplearnError(f"Can't write the pictures in {folder}: {error}.") from error


def with_mask(image: Tensor, labels: Tensor) -> Tensor:
    """The picture under its classes' colours; where no class counts it is left as it is."""
    palette = torch.tensor(COLOURS, dtype=torch.float32, device=image.device) / 255
    colours = palette[labels.clamp(min=0) % len(COLOURS)].permute(2, 0, 1)
    return torch.where(labels >= 0, 0.45 * image + 0.55 * colours, image)


def draw_boxes(picture: Any, boxes: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Named boxes; those that were found only where they are likely."""
    from PIL import ImageDraw, ImageFont

    pen = ImageDraw.Draw(picture)
    pen.font = ImageFont.load_default(size=max(10, picture.width // 32))  # readable on a sheet, half as large
    scores = boxes["scores"].tolist() if "scores" in boxes else [None] * len(boxes["labels"])
    for box, label, score in zip(boxes["boxes"].tolist(), boxes["labels"].tolist(), scores, strict=True):
        if score is not None and score < SURE:
            continue
        pen.rectangle(box, outline=COLOURS[label % len(COLOURS)], width=2)
        text = names[label] if score is None else f"{names[label]} {score:.2f}"
        place = (box[0] + 3, max(0.0, box[1] + 1))
        pen.rectangle(pen.textbbox(place, text), fill=(0, 0, 0))
        pen.text(place, text, fill="white")


def legend(names: Sequence[str]) -> Any:
    """The classes' colours and names, in lines of a sheet's width."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=14)
    places, left, top = [], 0, 0
    for name in names:
        width = 30 + round(font.getlength(name))
        if left and left + width > LEGEND_WIDTH:
            left, top = 0, top + LINE
        places.append((left, top))
        left += width
    picture = Image.new("RGB", (LEGEND_WIDTH, top + LINE), "white")
    pen = ImageDraw.Draw(picture)
    for number, (name, (left, top)) in enumerate(zip(names, places, strict=True)):
        pen.rectangle((left, top + 3, left + 13, top + 16), fill=COLOURS[number % len(COLOURS)])
        pen.text((left + 18, top + 1), name, fill="black", font=font)
    return picture
