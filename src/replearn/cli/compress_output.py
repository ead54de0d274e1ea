"""The files that `replearn compress` writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..compression import Agreement, Compressed
from ..compression.batches import model_inputs
from ..compression.curve import curve, draw
from ..compression.shipping import ship
from ..deployment.exporting import export
from ..errors import ReplearnError
from ..planning.serialization import encode
from .compress_model import Subject

# beside a standard model's own file a bare one would have the same name
FILES = {"safetensors": "weights.safetensors", "pt2": "model.pt2", "onnx": "model.onnx"}
WITH_THE_MODEL = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model"),
    *("chat_template*", "preprocessor_config.json", "processor_config.json"),
)


def written(
    small: Compressed,
    subject: Subject,
    batches: Sequence[Any],
    accuracy: Any,
    out: Path,
    formats: Sequence[str],
    picture: Path | None,
    samples: int,
    progress: Callable[[str], None],
) -> tuple[str, list[str]]:
    """Write the picture, compress.json and the model; returns the JSON, and lines to print."""
    lines: list[str] = []
    about = summary(small, subject)
    if str(picture) != "none":
        found = curve(subject.model, batches, small, accuracy=accuracy, samples=samples, progress=progress)
        about["curve"] = asdict(found)
        files = [picture] if picture else [out / "compress.png", out / "compress.svg"]
        draw(found, *files)
        lines += map(str, files)
        reached = [found.points[0].kept, found.chosen.kept]
    elif accuracy is not None:
        reached = [accuracy(subject.model), accuracy(small.model)]
    if accuracy is not None:
        about["accuracy"] = reached
        lines.insert(0, "accuracy {:.2f} -> {:.2f} %\n".format(*reached))
    file = out / "compress.json"
    file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")  # so that a refused format loses nothing
    lines.append(str(file))
    wanted, example = list(formats), model_inputs(batches[0], None)
    if not wanted or "standard" in wanted:
        try:
            lines.append(str(ship(small, out, example)))
            about["standard"] = True
            beside(subject, out)
        except ReplearnError as error:
            if wanted:
                raise ReplearnError(f"--format standard: {error}") from error
            lines.append(f"note  no standard model: {error}")
            about["standard"] = False
            wanted = ["pt2"]
    about["files"] = []
    for name in [name for name in wanted if name in FILES]:
        try:
            made = export(small.model.eval(), out / FILES[name], example, to=name)
        except ReplearnError as error:
            raise ReplearnError(f"--format {name}: {error}") from error
        about["files"].append(str(made.path))
        lines.append(str(made))
    text = json.dumps(about, indent=1)
    file.write_text(text + "\n", encoding="utf-8")
    return text, lines


def beside(subject: Subject, out: Path) -> None:
    """A tokenizer or a preprocessor belongs to the model and goes with it."""
    for pattern in WITH_THE_MODEL if subject.folder is not None else ():
        for file in (subject.folder or out).glob(pattern):
            if file.resolve().parent != out.resolve():
                shutil.copy2(file, out / file.name)


def finite(judged: Agreement) -> dict[str, float | None]:
    """A comparison as JSON has it, which knows no infinity and no NaN."""
    return {key: value if value < 1e300 else None for key, value in asdict(judged).items()}


def summary(small: Compressed, subject: Subject) -> dict[str, Any]:
    """What went and what it brought, as JSON has it."""
    alike = ("budget", "num_blocks", "num_samples", "seconds", "before", "promised", "after")
    return {
        "model": subject.name,
        "class": type(small.model).__name__,
        **{name: encode(getattr(small, name)) for name in (*alike, "removed", "healing", "notes")},
        "blocks": [{"name": fit.name, "form": fit.form, "error": fit.error} for fit in small.fitted.blocks],
        "agreement": finite(small.agreement),
        "bare_removal": finite(small.removal),
    }
