"""The calibration data of `replearn compress`: pictures, a text, a known data set, or own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ..compression.batches import device_of
from ..compression.measure import main_output
from ..errors import ReplearnError, first_line
from ..experiments.training import data as data_room
from ..experiments.training.data.scenes import open_picture
from .compress_model import Subject
from .subjects import called, is_hub_name

TESTED = 2000  # labelled images that the accuracy is taken on


Samples = tuple[Iterable[Any], Callable[[nn.Module], float] | None]


def samples_of(
    text: str | None, subject: Subject, count: int, batch_size: int, length: int, root: Path | None
) -> Samples:
    """Batches, and the accuracy of a model in percent where there are test labels, by --data."""
    if text is None:
        if (run := subject.run) is None:
            raise ReplearnError(
                f"--data is missing: {subject.name} does not say what it is for. Add --data FOLDER."
            )
        accuracy = run.score if run.metric.lower().endswith("accuracy") else None
        return run.train_batches(count, batch_size), accuracy
    if ".py:" in text:
        return called("--data", text), None
    if text in data_room.available():
        return of_set(text, subject, count, batch_size, root)
    if (path := Path(text)).is_dir():
        return of_pictures(path, subject, count, batch_size)
    return of_text(path, subject, count, batch_size, length), None


def check_place(text: str | None) -> None:
    """ReplearnError if --data names nothing, before a model is fetched for it."""
    known = data_room.available()
    if text is not None and ".py:" not in text and text not in known and not Path(text).exists():
        raise ReplearnError(
            f"--data {text}: there is no such folder, file or data set. Write a folder of images, a text file, "
            f"FILE.py:FUNCTION, or one of {', '.join(known)}."
        )


def of_set(name: str, subject: Subject, count: int, batch_size: int, root: Path | None) -> Samples:
    """Training images of a known data set, and the accuracy on its test images."""
    loaded = data_room.load(name, root)
    if not isinstance(loaded, data_room.ImageSet):
        raise ReplearnError(f"--data {name} is no set of images that fits in memory; give a folder of images.")
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (loaded.mean, loaded.std))
    side = subject.size or loaded.size

    def ready(images: Tensor) -> Tensor:
        made = images.float().div(255).sub(mean).div(std)
        return made if side == loaded.size else interpolate(made, size=(side, side), mode="bilinear")

    images, labels = (part[:TESTED].split(batch_size) for part in (loaded.test_images, loaded.test_labels))
    accuracy = accuracy_on(lambda: zip(map(ready, images), labels, strict=True))
    order = torch.randperm(loaded.num_train, generator=torch.Generator().manual_seed(0))[:count]
    return [ready(loaded.train_images[part]) for part in order.split(batch_size)], accuracy


def accuracy_on(batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> Callable[[nn.Module], float]:
    """The accuracy of a model in percent, on labelled images."""

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        device = device_of(model)
        hits = [main_output(model(images.to(device))).argmax(-1).cpu() == labels for images, labels in batches()]
        return 100 * float(torch.cat(hits).double().mean())

    return accuracy


def of_pictures(folder: Path, subject: Subject, count: int, batch_size: int) -> Samples:
    """Pictures of a folder and of those inside it, evenly over them all, cut out of the middle.

    Where there is a folder for each class of the model, in alphabetical order, its accuracy is taken on as many
    other pictures.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS
    from torchvision.transforms import v2

    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
    if not files:
        raise ReplearnError(f"--data {folder}: there is no image in it ({', '.join(IMG_EXTENSIONS[:4])}, ...).")
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    channels = next((m.in_channels for m in subject.model.modules() if isinstance(m, nn.Conv2d)), 3)
    side = subject.size or 224
    ready = v2.Compose([
        v2.Resize(side if side <= 64 else round(side / 0.875)),
        v2.CenterCrop(side),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(subject.mean[:channels], subject.std[:channels]),
    ])  # fmt: skip
    colours = "L" if channels == 1 else "RGB"

    def opened(places: list[int]) -> tuple[Tensor, ...]:
        made = [ready(open_picture(files[place]).convert(colours)) for place in places]
        return torch.stack(made).split(batch_size)

    given, others = opened(order[:count]), order[count : 2 * count]
    names = [file.relative_to(folder).parts[0] for file in files]
    classes = sorted(set(names))
    with torch.no_grad():
        shape = main_output(subject.model(given[0][:1].to(device_of(subject.model)))).shape
    if not others or shape != (1, len(classes)):
        return given, None
    labels = torch.tensor([classes.index(names[place]) for place in others]).split(batch_size)
    pairs = list(zip(opened(others), labels, strict=True))
    return given, accuracy_on(lambda: pairs)


def of_text(file: Path, subject: Subject, count: int, batch_size: int, length: int) -> list[dict[str, Tensor]]:
    """A text in windows of tokens, by the tokenizer in the model's folder."""
    if subject.folder is None:
        raise ReplearnError(
            f"--data {file} is a text, and {subject.name} has no tokenizer. Give FILE.py:FUNCTION that returns "
            "batches of token numbers."
        )
    from transformers import AutoTokenizer

    folder, local = subject.folder, not is_hub_name(str(subject.folder))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=local)
        words = tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    except (OSError, ValueError, TypeError) as error:
        told = first_line(error)
        raise ReplearnError(f"--data {file} can't be read with the tokenizer of {folder}: {told}") from error
    most = getattr(getattr(subject.model, "config", None), "max_position_embeddings", None) or length
    length = min(length, most)
    number = min(len(words) // length, count)
    if number < 2:
        raise ReplearnError(f"--data {file} has {len(words)} tokens, fewer than two windows of --length {length}.")
    windows = words[: number * length].view(number, length)
    return [{"input_ids": part} for part in windows.split(batch_size)]
