"""The application: its commands, and how errors are told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import torch
import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import ReplearnError
from . import analyze, bench, compare, data, evaluate, export, figures, plan, recipes, report, train

UsageError: Any = typer.BadParameter.__base__  # typer brings its own copy of click, or needs click, by version


class ReadableErrors(TyperGroup):
    """Tells in one line what the user can mend, and ends with 2 (130 after Ctrl-C); bugs keep a traceback."""

    def main(
        self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        extra["standalone_mode"] = False
        if not standalone_mode:
            return super().main(args, *rest, **extra)
        try:
            sys.exit(super().main(args, *rest, **extra) or 0)
        except UsageError as error:
            where = f" See `{error.ctx.command_path} --help`." if error.ctx else ""
            fail(error.format_message().rstrip(".") + "." + where)
        except typer.Abort:  # Ctrl-C where nothing trains
            fail("interrupted", 130)
        except ReplearnError as error:
            fail(str(error), 130 if type(error).__name__ == "Interrupted" else 2)
        except torch.OutOfMemoryError:
            fail("the GPU has too little memory; try --set accumulate=2, a smaller batch_size, or --together 1")
        except ModuleNotFoundError as error:
            fail(f"this needs {error.name}, which is not installed: pip install 'replearn[all]'")
        except OSError as error:
            fail(str(error))


def fail(text: str, code: int = 2) -> NoReturn:
    print(f"replearn: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


app = typer.Typer(
    cls=ReadableErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"replearn {__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def replearn(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Replacement Learning: train with every K-th block replaced by a light operator, and compare.

    Start with `replearn compare demo`: two minutes on a CPU, nothing to download.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(plan.plan)
app.command()(analyze.analyze)
app.command()(train.train)
app.command()(compare.compare)
app.command()(evaluate.evaluate)
app.command()(report.report)
app.command()(report.watch)
app.command()(figures.figures)
app.command()(export.export)
app.add_typer(bench.app, name="bench")
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
