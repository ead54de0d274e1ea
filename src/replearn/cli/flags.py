"""The command line's flags, each named and described once; and its lists: repeated or with commas, alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from ..errors import ReplearnError


def listed(given: list[str]) -> list[str]:
    """`--x a,b --x c` as a, b and c; the commas of an operator's own options stay.

    >>> listed(["layer1.1, layer1.3", "layer2.1"])
    ['layer1.1', 'layer1.3', 'layer2.1']
    >>> listed(["basic:correction=low-rank,rank=4,no_weights"])
    ['basic:correction=low-rank,rank=4', 'no_weights']
    """
    found: list[str] = []
    for part in filter(None, (part.strip() for text in given for part in text.split(","))):
        if found and ":" in found[-1] and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def several(*names: str, help: str) -> Any:
    """An option that takes a list; a list of nothing is an error."""

    def read(given: list[str] | None) -> list[str] | None:
        if given and not listed(given):
            raise typer.BadParameter("it names nothing; write at least one")
        return listed(given) if given else None

    return typer.Option(*names, callback=read, help=help)


def whole_numbers(flag: str, given: list[str], least: int = 0) -> list[int]:
    """Numbers as `0,1,2` or `0-4`; ReplearnError that names the flag."""
    numbers: list[int] = []
    for part in given:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not least <= first <= last:
            raise ReplearnError(f"{flag} {part}: write whole numbers of at least {least}, as 2,3,4 or 2-4.")
        numbers += range(first, last + 1)
    return list(dict.fromkeys(numbers))


def drawable(given: Path | None) -> Path | None:
    """The file of a picture, refused before the work whose picture it is."""
    if given is not None and given.suffix not in (".svg", ".png", ".pdf", ".jpg") and str(given) != "none":
        raise typer.BadParameter(f"{given} is no name of a picture: end it with .svg, .png, .pdf or .jpg")
    return given


def out(help: str) -> Any:
    return typer.Option("--out", "-o", help=help)


# where things are
Data: TypeAlias = Annotated[str | None, typer.Option(help="Data set; the recipe's first if not given.")]
DataRoot: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder of the data sets; else $REPLEARN_DATA, else ./data.")
]
Device: TypeAlias = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto for a GPU if there is one.")]
Out: TypeAlias = Annotated[Path | None, out("Folder of the runs; runs/RECIPE if not given.")]
Record: TypeAlias = Annotated[Path | None, out("Write everything that was measured to this file, as JSON.")]
Runs: TypeAlias = Annotated[Path, typer.Argument(help="The folder of the runs.")]
Picture: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=drawable, help="Draw the picture in this file; none for no picture."),
]
Pretrained: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Trained weights to start from: a file, or timm:NAME.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

# which runs
RecipeName: TypeAlias = Annotated[str, typer.Argument(help="A recipe's name, or a file of your own.")]
Epochs: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Epochs, instead of the recipe's.")]
Methods: TypeAlias = Annotated[
    list[str] | None,
    several("--methods", "--method", help="Some of its rows, as e2e,removal,repl; all if not given."),
]
Seeds: TypeAlias = Annotated[list[str] | None, several(help="Seeds, as 0,1,2 or 0-4; 0,1,2 if not given.")]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe, as optimizer.lr=0.1."),
]

Logger: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Send every epoch there too: wandb, mlflow or tensorboard, by extras of these names."),
]

# which blocks
Interval: TypeAlias = Annotated[int, typer.Option(help="Every K-th block.")]
First: TypeAlias = Annotated[int | None, typer.Option(help="Position of the first target in a stack.")]
Targets: TypeAlias = Annotated[list[str] | None, several(help="Names of blocks, as layer3.1,layer3.3, instead.")]
Operator: TypeAlias = Annotated[
    str | None, typer.Option(help="An operator, as basic:correction=full; the paper's if not given.")
]

# which input
Samples: TypeAlias = Annotated[int, typer.Option(min=2, help="Images, or windows of text, to look at.")]
BatchSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Images or texts in a batch.")]
Length: TypeAlias = Annotated[int, typer.Option(min=1, help="Tokens in a text.")]
Size: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Side length of the images; the model's own if not given.")
]

# which machine
Gpu: TypeAlias = Annotated[str | None, typer.Option(help="Predict times for this GPU, as H200, A100 or RTX4090.")]
Probe: TypeAlias = Annotated[
    bool, typer.Option("--probe", help="Predict times for this machine; measures it, some 10 seconds.")
]
