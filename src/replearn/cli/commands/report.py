"""`replearn report`: results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import flags


def report(
    folder: flags.Runs = Path("runs"),
    out: Annotated[Path, flags.out("The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's heading.")] = "",
) -> None:
    """Write one self-contained HTML page from all results below a folder.

    Tables with intervals and verdicts, the paper's numbers beside ours, curves, costs, plans, and
    the commands that trained the runs. Files that can't be read are named on the page.

    Examples:

    * `replearn report runs/ -o report.html`
    * `replearn report benchmarks/results`
    """
    from ...experiments.report.markup import counted
    from ...experiments.report.page import build_report, printable

    made = build_report(folder, out, title=title)
    runs, sections = counted(len(made.collection.runs), "run"), counted(len(made.sections), "comparison")
    typer.echo(f"{made.page}: {runs} in {sections}.")
    for entry in made.collection.unread[:5]:
        typer.echo(printable(f"not read: {entry.path}: {entry.reason}"), err=True)
