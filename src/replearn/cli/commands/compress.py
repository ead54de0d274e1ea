"""`replearn compress`: take blocks out of a trained model, repair the rest, and write what is left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import ReplearnError
from .. import flags


def compress(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder of a run, hf:FOLDER_OR_NAME, timm:NAME, torchvision:NAME, or FILE.py:FUNCTION.",
        ),
    ],
    out: Annotated[Path, flags.out("Folder of the files.")],
    budget: Annotated[
        str, typer.Option(help="As latency<=75%, parameters<=60%, flops<=70%, blocks=12, or blocks' names.")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="A folder of images, a text file, a data set or FILE.py:FUNCTION; a run has its own."),
    ] = None,
    pretrained: flags.Pretrained = None,
    heal: Annotated[
        str | None, typer.Option(help="Train towards the full model: epochs, or seconds as 30s.")
    ] = None,
    form: Annotated[
        str, typer.Option(help="What stands for a block: auto, removal (a standard model), full, low-rank, ...")
    ] = "auto",
    formats: Annotated[
        list[str] | None,
        flags.several("--format", help="Of standard, pt2, onnx, safetensors; standard if it can be, else pt2."),
    ] = None,
    samples: flags.Samples = 512,
    batch_size: flags.BatchSize = 64,
    length: flags.Length = 128,
    size: flags.Size = None,
    picture: flags.Picture = None,
    device: flags.Device = "auto",
    data_root: flags.DataRoot = None,
    as_json: flags.Json = False,
) -> None:
    """Take blocks out of a trained model, with as little harm as a few unlabelled samples allow.

    Prints what went, what it costs and what it keeps, and writes compress.json, a picture (compress.png, .svg)
    and the model. With --form removal that is the standard architecture with fewer blocks, which its own library
    loads.

    Examples:

    * `replearn compress runs/t1_resnet32/cifar10/e2e/seed-0 --budget "latency<=75%" --heal 1 -o out`
    * `replearn compress hf:my_llama --data text.txt --budget blocks=4 --form removal -o out`
    * `replearn compress torchvision:resnet50 --data images --budget "flops<=80%" -o out`
    * `replearn compress timm:resnet50 --pretrained mine.safetensors --data images --budget blocks=3 -o out`
    * `replearn compress my_models.py:trained --data cifar10 --budget blocks=12 --format onnx -o out`

    FUNCTION returns the trained model and an example of its input; that of --data returns batches.
    """
    from rich.console import Console

    from ...compression import compress as compress_model
    from ...compression.choose import read_budget
    from ...compression.forms import FORMS
    from ...compression.heal import read_heal
    from ...experiments.training.fit import device_named
    from ..compress_data import check_place, samples_of
    from ..compress_model import subject_of
    from ..compress_output import FILES, written

    read_budget(budget)  # what is wrong is told before anything is loaded
    if heal is not None:
        read_heal(heal)
    if form not in ("auto", *FORMS):
        raise ReplearnError(f"--form {form}: write auto or one of {', '.join(FORMS)}.")
    if unknown := [part for part in formats or () if part not in ("standard", *FILES)]:
        raise ReplearnError(f"--format {unknown[0]}: write some of standard, {', '.join(FILES)}.")
    if out.exists() and not out.is_dir():
        raise ReplearnError(f"--out {out} is a file: name a folder.")
    check_place(data)
    subject = subject_of(model, pretrained, size, device_named(device), data_root)
    given, accuracy = samples_of(data, subject, samples, batch_size, length, data_root)
    batches = list(given)
    more: dict[str, Any] = {"form": form, "heal": heal, "samples": samples}
    with Console(stderr=True).status("reading") as status:
        try:
            small = compress_model(subject.model, batches, budget=budget, progress=status.update, **more)
        except ReplearnError as error:
            loader = f"--data {data}" if data else "the run's data"
            raise ReplearnError(re.sub("[Tt]he loader", lambda _: loader, str(error))) from error
        out.mkdir(parents=True, exist_ok=True)
        table, lines = written(
            small, subject, batches, accuracy, out, formats or (), picture, samples, status.update
        )
    typer.echo(table if as_json else "\n".join([str(small), "", *lines]))
