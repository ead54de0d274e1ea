"""One file a command: a function of the same name, or a Typer `app` with commands below it."""
