"""The flags that several commands share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Data: TypeAlias = Annotated[str | None, typer.Option(help="Data set; the recipe's first if not given.")]
DataRoot: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder of the data sets; else $REPLEARN_DATA, else ./data.")
]
Device: TypeAlias = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto for a GPU if there is one.")]
Epochs: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Epochs, instead of the recipe's.")]
Out: TypeAlias = Annotated[Path | None, typer.Option(help="Folder of the runs; runs/RECIPE if not given.")]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the recipe, as optimizer.lr=0.1."),
]
Pretrained: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Trained weights to start from: a file, a folder, or timm:NAME."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
