"""`replearn watch`: the page of `replearn report`, live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import flags


def watch(
    folder: flags.Runs = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8378,
) -> None:
    """Show the same page live, for runs in progress, in a browser on this machine.

    It only reads, and listens on 127.0.0.1 alone. Ctrl-C ends it.

    Examples:

    * `replearn watch runs/`
    """
    from ...experiments.report.serving import watch as serve

    serve(folder, port, lambda address: typer.echo(f"{address} shows {folder}; Ctrl-C ends it."))
