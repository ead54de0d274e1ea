"""`replearn data`: what data is there, where it was looked for, whether it is whole, and how to get it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .. import flags

if TYPE_CHECKING:
    from ...experiments.training.data import DataStatus

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
Name = Annotated[str, typer.Argument(help="A data set's name.")]


@app.callback(invoke_without_command=True)
def listing(context: typer.Context, data_root: flags.DataRoot = None) -> None:
    """Say what data is there, check it, or download it.

    Examples:

    * `replearn data`
    * `replearn data check cifar10`
    * `replearn data download svhn --data-root ~/data`
    """
    from ...experiments.training import data as room
    from ...planning.table import text_table

    if context.invoked_subcommand is not None:
        return
    rows = []
    for each in (room.status(name, data_root) for name in room.available()):  # one in memory at a time
        counts = (f"{each.data.num_train:,}", f"{each.data.num_test:,}") if each.data else ("", "")
        rows.append((each.source.name, state(each), *counts, place(each)))
    typer.echo("\n".join(text_table(("data set", "state", "train", "test", "where"), rows, right=(2, 3))))


@app.command()
def check(name: Name, data_root: flags.DataRoot = None) -> None:
    """Load a data set, check its files and count it; ends with 1 if it can't be trained on."""
    from ...experiments.training import data as room

    found = room.status(name, data_root)
    typer.echo(f"{found.source.title}: {state(found)}")
    if found.found:
        typer.echo(f"found in {found.found}")
    if (data := found.data) is not None:
        samples = f"{data.num_train:,} training and {data.num_test:,} test {data.unit}"
        typer.echo(f"{samples}, {data.num_classes:,} {data.classes}")
    if found.problem:
        typer.echo(found.problem)
        raise typer.Exit(1)


@app.command()
def download(name: Name, data_root: flags.DataRoot = None) -> None:
    """Fetch a data set from its official address, check it and unpack it."""
    from ...experiments.training import data as room

    typer.echo(f"{name} is in {room.download(name, data_root)}")


def state(found: DataStatus) -> str:
    if found.problem is None:
        return "ok"
    return "missing" if found.found is None else "broken"


def place(found: DataStatus) -> str:
    if found.found:
        return str(found.found)
    inside = found.source.how if found.problem else "in an installed package"
    return "looked in " + ", ".join(map(str, found.looked)) if found.looked else inside
