"""Groups of commands that say, for a name that they do not have, which one was probably meant."""

from __future__ import annotations

import difflib
from typing import Any

import typer
from typer.core import TyperGroup

UsageError: Any = typer.BadParameter.__base__  # typer brings its own copy of click, or needs click, by version


class Near(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            near = difflib.get_close_matches(args[0], known, 1)
            if len(known) == 1:
                hint = f"Did you mean `{ctx.command_path} {known[0]} {args[0]}`?"
            else:
                hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}."
            raise UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)
