"""The calibration data of `replearn compress`: pictures, a text, a known data set, or own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ..errors import ReplearnError
from ..experiments.training import data as data_room
from .commands.export import function_of
from .compress_model import Subject
from .subjects import is_hub_name

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
TESTED = 2000  # labelled images that the accuracy is taken on


@dataclass(frozen=True, eq=False)
class Samples:
    """Batches, and the accuracy of a model in percent where there are test labels."""

    batches: Iterable[Any]
    accuracy: Callable[[nn.Module], float] | None = None


def samples_of(
    text: str | None, subject: Subject, count: int, batch_size: int, length: int, root: Path | None
) -> Samples:
    """Read --data; ReplearnError that names it for what can't be read."""
    if text is None:
        return of_run(subject, count, batch_size)
    if ".py:" in text:
        return Samples(function_of("--data", text)())
    if text in data_room.available():
        return of_set(text, subject, count, batch_size, root)
    path = Path(text)
    if path.is_dir():
        return Samples(of_pictures(path, subject, count, batch_size))
    if path.is_file():
        return Samples(of_text(path, subject, count, batch_size, length))
    raise ReplearnError(
        f"--data {text}: there is no such folder, file or data set. Write a folder of images, a text file, "
        f"FILE.py:FUNCTION, or one of {', '.join(data_room.available())}."
    )


def of_run(subject: Subject, count: int, batch_size: int) -> Samples:
    run = subject.run
    if run is None:
        raise ReplearnError(f"--data is missing: {subject.name} does not say what it is for. Add --data FOLDER.")
    accuracy = run.score if run.metric.lower().endswith("accuracy") else None
    return Samples(run.train_batches(count, batch_size), accuracy)


def of_set(name: str, subject: Subject, count: int, batch_size: int, root: Path | None) -> Samples:
    """Training images of a known data set, and the accuracy on its test images."""
    loaded = data_room.load(name, root)
    if not isinstance(loaded, data_room.ImageSet):
        raise ReplearnError(f"--data {name} is no set of images that fits in memory; give a folder of images.")
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (loaded.mean, loaded.std))
    device = next(subject.model.parameters()).device

    def ready(images: Tensor) -> Tensor:
        made = images.float().div(255).sub(mean).div(std)
        side = subject.size or loaded.size
        return made if side == loaded.size else interpolate(made, size=(side, side), mode="bilinear")

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        hits = total = 0
        pairs = (loaded.test_images[:TESTED].split(batch_size), loaded.test_labels[:TESTED].split(batch_size))
        for images, labels in zip(*pairs, strict=True):
            made = model(ready(images).to(device))
            logits = made if isinstance(made, Tensor) else made.logits
            hits += int((logits.argmax(-1).cpu() == labels).sum())
            total += len(labels)
        return 100 * hits / total

    order = torch.randperm(loaded.num_train, generator=torch.Generator().manual_seed(0))[:count]
    return Samples([ready(loaded.train_images[part]) for part in order.split(batch_size)], accuracy)


def of_pictures(folder: Path, subject: Subject, count: int, batch_size: int) -> list[Tensor]:
    """Pictures of a folder and of those inside it, evenly over them all, cut out of the middle."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in PICTURES)
    if not files:
        raise ReplearnError(f"--data {folder}: there is no image in it ({', '.join(PICTURES[:4])}, ...).")
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [files[place] for place in order[:count]]
    channels = next((m.in_channels for m in subject.model.modules() if isinstance(m, nn.Conv2d)), 3)
    made = [picture(file, subject, channels) for file in chosen]
    return list(torch.stack(made).split(batch_size))


def picture(file: Path, subject: Subject, channels: int) -> Tensor:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            image = opened.convert("L" if channels == 1 else "RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ReplearnError(f"--data: {file} can't be read as an image: {error}.") from error
    side = subject.size or 224
    scale = max(side, round(side / 0.875)) / min(image.size) if side > 64 else side / min(image.size)
    image = image.resize((max(side, round(image.width * scale)), max(side, round(image.height * scale))))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    cut = image.crop((left, top, left + side, top + side))
    pixels = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(side, side, -1).permute(2, 0, 1)
    mean, std = (torch.tensor(values[:channels]).view(-1, 1, 1) for values in (subject.mean, subject.std))
    return pixels.float().div(255).sub(mean).div(std)


def of_text(file: Path, subject: Subject, count: int, batch_size: int, length: int) -> list[dict[str, Tensor]]:
    """A text in windows of tokens, by the tokenizer in the model's folder."""
    if subject.folder is None:
        raise ReplearnError(
            f"--data {file} is a text, and {subject.name} has no tokenizer. Give FILE.py:FUNCTION that returns "
            "batches of token numbers."
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            subject.folder, local_files_only=not is_hub_name(str(subject.folder))
        )
        words = tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    except (OSError, ValueError, TypeError, UnicodeDecodeError) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise ReplearnError(
            f"--data {file} can't be read with the tokenizer of {subject.folder}: {told}"
        ) from error
    most = getattr(getattr(subject.model, "config", None), "max_position_embeddings", None) or length
    length = min(length, most)
    number = min(len(words) // length, count)
    if number < 2:
        raise ReplearnError(f"--data {file} has {len(words)} tokens, fewer than two windows of --length {length}.")
    windows = words[: number * length].view(number, length)
    return [{"input_ids": part} for part in windows.split(batch_size)]
