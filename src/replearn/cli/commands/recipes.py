"""`replearn recipes`: what can be trained, and what each recipe claims."""

from __future__ import annotations

import json
from textwrap import shorten

import typer

from .. import flags

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.callback(invoke_without_command=True)
def listing(context: typer.Context) -> None:
    """List the recipes and their claims, or show one.

    Examples:

    * `replearn recipes`
    * `replearn recipes show t1_resnet32`
    """
    from ...experiments import recipes
    from ...planning.table import text_table

    if context.invoked_subcommand is not None:
        return
    rows = []
    for name in recipes.available():
        recipe = recipes.recipe(name)
        expected = recipes.claim(name).get("Expected", recipes.UNMEASURED)
        about = (name, recipe.table, recipe.model, ", ".join(recipe.data))
        rows.append((*about, str(len(recipe.variants)), shorten(expected, 60, placeholder=" ...")))
    head = ("recipe", "table", "model", "data", "methods", "expected")
    typer.echo("\n".join(text_table(head, rows, right=(4,))))
    typer.echo("\nSee one with `replearn recipes show NAME`.")


@app.command()
def show(name: flags.RecipeName, as_json: flags.Json = False) -> None:
    """Show a recipe: its claim, its methods, its settings and the paper's numbers."""
    from ...experiments import recipes
    from ...experiments.training.recipe import slug
    from ...experiments.training.tasks import task_named
    from ...planning.table import text_table

    recipe = recipes.recipe(name)
    fields = recipe.to_dict()
    if as_json:
        typer.echo(json.dumps(fields, indent=1))
        return
    rows = []
    for row in recipe.variants:
        place = "" if row.method == "e2e" else f"K={row.interval}, first={row.begin}"
        rows.append((slug(row.label), row.label, row.method, place, row.operator.label() if row.operator else ""))
    lines = [recipes.about(name), "", "Methods"]
    lines += text_table(("--method", "label", "method", "placement", "operator"), rows)
    if recipe.paper:
        printed = []
        for known in recipe.paper:
            numbers = (known.score, known.std, known.memory_gb, known.seconds_per_epoch)
            texts = ("" if number is None else f"{number:.2f}" for number in numbers)
            printed.append((known.data, known.label, *texts))
        head = ("data", "label", task_named(recipe.task).metric.name, "std", "memory GB", "s/epoch")
        lines += ["", "The paper's numbers", *text_table(head, printed, right=(2, 3, 4, 5))]
    lines += ["", "Settings"]
    lines += [f"{key}: {json.dumps(fields[key])}" for key in fields if key not in ("name", "variants", "paper")]
    typer.echo("\n".join(lines))
