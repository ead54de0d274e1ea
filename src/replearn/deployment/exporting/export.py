"""Export: write a file, read it back, compare, and only then put it in its place."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import ReplearnError
from ...fast.verify import compare
from ...planning.validate import own_copy, unwrapped
from ...surgery.tensor_file import refuse_special
from ..plain import check_plain
from .formats import FORMATS
from .tracing import Job, batched, inputs_of, random_like, resized, run


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was read back and gave the model's outputs."""

    path: Path
    format: str
    bytes: int
    batch_sizes: tuple[int, ...]  # that were compared
    difference: float  # the largest, as a share of an output's largest value
    tolerance: float | None  # what was allowed; None: rounding in the outputs' dtype

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.batch_sizes))
        allowed = "rounding" if self.tolerance is None else f"{self.tolerance:.0e}"
        return (
            f"{self.path}: {self.format}, {self.bytes / 1e6:.1f} MB; read back and compared with the model on "
            f"random input, batch {sizes}: largest difference {self.difference:.1e} (allowed: {allowed})"
        )


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    *,
    to: str | None = None,
    dynamic_batch: bool = True,
) -> Exported:
    """Write a deployed model to a file that needs nothing of this package: safetensors, pt2 or onnx.

    The format is `to`, or the file's suffix. `example` is an input (a tensor, a tuple of arguments or a dict
    of keywords); the batch size stays free. The file is loaded back and run on random input of two batch
    sizes before it appears at `path`; a difference beyond rounding is a ReplearnError, and nothing is written.

    >>> import replearn, tempfile, torch
    >>> from replearn.deployment.exporting import export
    >>> model = replearn.models.CifarResNet(8, width=4).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(model, f"{folder}/model.safetensors", torch.randn(2, 3, 8, 8)).difference
    0.0
    """
    name = format_of(path, to)
    form = FORMATS[name]
    model = unwrapped(model)
    check_plain(model, "Export")
    file = Path(os.path.realpath(path))
    if not file.parent.is_dir():
        raise ReplearnError(f"Can't export to {path}: the folder {file.parent} does not exist; create it first.")
    if file.is_dir():
        raise ReplearnError(
            f"Can't export to {path}, which is a folder: name a file in it, as model{form.suffix}."
        )
    refuse_special(file)
    inputs = inputs_of(example)
    plain = own_copy(model).cpu()
    job = Job(model=plain, inputs=inputs, dynamic_batch=dynamic_batch)
    sizes = (1, 3) if dynamic_batch else (len(batched(inputs)[0]),)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".replearn-export-") as folder:
        written = Path(folder) / file.name
        form.write(job, written)
        again, reference = form.read(job, written), job.reference[0]
        worst = 0.0
        for seed, size in enumerate(sizes):
            given = random_like(resized(inputs, size), seed)
            worst = max(worst, compare(run(reference, given), again(given), f"the {name} file", form.tolerance))
        size = sum(part.stat().st_size for part in Path(folder).iterdir())
        for part in sorted(Path(folder).iterdir()):
            os.replace(part, file.parent / part.name)
    return Exported(
        path=Path(path), format=name, bytes=size, batch_sizes=sizes, difference=worst, tolerance=form.tolerance
    )


def format_of(path: str | os.PathLike[str], to: str | None) -> str:
    """The format's name: as asked, or by the file's suffix."""
    if to is not None and to not in FORMATS:
        raise ReplearnError(f"There is no format {to!r}; there are {', '.join(FORMATS)}.")
    by_suffix = (name for name, form in FORMATS.items() if os.fspath(path).endswith(form.suffix))
    found = to or next(by_suffix, None)
    if found is None:
        suffixes = ", ".join(form.suffix for form in FORMATS.values())
        raise ReplearnError(
            f"The format of {path} is not clear: end its name with one of {suffixes}, or write to=."
        )
    return found
