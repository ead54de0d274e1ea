"""The command line: one file a command, few flags; what decides a run is in the recipes."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `replearn` as the shell calls it."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"replearn: the command line needs {error.name}: pip install 'replearn[train]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="replearn")
