"""The application: the folder `commands` is its list, and errors are told in one line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import ReplearnError

COMMANDS = Path(__file__).parent / "commands"
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
UsageError: Any = typer.BadParameter.__base__  # typer brings its own copy of click, or needs click, by version


class Commands(TyperGroup):
    """Imports a command's file when that command runs; help reads its first line from the source.

    What the user can mend is told in one line, with exit code 2 (130 after Ctrl-C); bugs keep a traceback.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = {file.stem: None for file in sorted(COMMANDS.glob("[a-z]*.py"))}
        self.commands = names  # `get_command` makes them

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=summary_of(cmd_name)) if cmd_name in self.commands else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:  # as deploy, which export does
            told = [(each, summary_of(each)) for each in self.commands]
            if doing := [f"`replearn {each}`: {line}" for each, line in told if args[0] in line.lower().split()]:
                fail(f"No such command '{args[0]}'. There is {' '.join(doing)}")
        name, _, rest = super().resolve_command(ctx, args)
        return name, loaded(str(name)), rest

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
            fail(re.sub(r"(?<![.?])$", ".", error.format_message()) + where)
        except typer.Abort:  # Ctrl-C where nothing trains
            fail("interrupted", 130)
        except ReplearnError as error:
            fail(str(error), 130 if type(error).__name__ == "Interrupted" else 2)
        except ModuleNotFoundError as error:
            fail(f"this needs {error.name}, which is not installed: pip install 'replearn[all]'")
        except OSError as error:
            fail(str(error))
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which may not be loaded
                raise
            fail("the GPU has too little memory; try --set accumulate=2, a smaller batch_size, or --together 1")


def summary_of(name: str) -> str:
    """The first line of a command's docstring, read without importing what it needs."""
    tree = ast.parse((COMMANDS / f"{name}.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    own = next((node for node in functions if node.name == name), functions[0])
    return (ast.get_docstring(own) or "").partition("\n")[0]


@cache
def loaded(name: str) -> Any:
    """The command of a file."""
    module = import_module(f"{__package__}.commands.{name}")
    made = getattr(module, "app", None)
    if made is None:
        made = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
        made.command(name, context_settings=HELP)(getattr(module, name))
    made.info.name = name
    made.info.context_settings = HELP
    command: Any = typer.main.get_command(made)
    command.name = name
    for each in (command, *getattr(command, "commands", {}).values()):
        for param in each.params:
            if param.param_type_name == "argument" and not param.metavar:
                param.metavar = param.name.upper()  # as errors name it
        each.callback = naming_flags(each.callback, each.params)
    return command


def naming_flags(call: Callable[..., Any], params: Sequence[Any]) -> Callable[..., Any]:
    """`call`, with errors that name the flag: Python's `interval=1: ...` becomes `--interval 1: ...`.

    An error that quotes the value of one flag alone, as in "no operator 'base'", begins with that flag.
    """

    @wraps(call)
    def called(*args: Any, **values: Any) -> Any:
        try:
            return call(*args, **values)
        except ReplearnError as error:
            text = str(error)
            quoted: set[str] = set()
            for param in params:
                option = param.param_type_name == "option"
                flag = max(param.opts, key=len) if option else param.name.upper()
                value = values.get(param.name)
                if value is not None:
                    text = text.replace(f"{param.name}={value!r}", f"{flag} {value}")
                for item in value if isinstance(value, (list, tuple)) else ():  # --operators has operator='base'
                    text = text.replace(f"{param.name.removesuffix('s')}={item!r}", f"{flag} {item}")
                if option:  # what it should be: first=2 becomes --first 2
                    advised = rf"(?<![\w.(,-])(?<!, )(?<!--set ){param.name}=(['\"]?)([\w%:<>=-]+)\1"
                    text = re.sub(advised, rf"{flag} \2", text)
                if value is None:
                    continue
                if option and value != param.default:
                    given = [str(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
                    quoted |= {f"{flag} {item}" for item in given if f"'{item}'" in text}
            if len(quoted) == 1 and (begin := quoted.pop()).split()[0] not in text:
                text = f"{begin}: {text}"
            error.args = (text,)
            raise

    return called


def fail(text: str, code: int = 2) -> NoReturn:
    print(f"replearn: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=HELP,
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"replearn {__version__} (torch {version_of('torch')})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def replearn(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Make networks cheaper by replacing blocks: compress trained ones, or train with fewer.

    Start with `replearn compare demo`: two minutes on a CPU, nothing to download.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
