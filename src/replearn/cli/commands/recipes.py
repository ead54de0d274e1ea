"""`replearn recipes`: what can be trained, and what each recipe claims."""

from __future__ import annotations

import json

import typer

from .. import flags

app = typer.Typer()


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
        rows.append(
            (name, recipe.table, recipe.model, ", ".join(recipe.data), str(len(recipe.variants)), expected)
        )
    typer.echo(
        "\n".join(text_table(("recipe", "table", "model", "data", "methods", "expected"), rows, right=(4,)))
    )
    typer.echo("\nSee one with `replearn recipes show NAME`.")


@app.command()
def show(name: flags.RecipeName, as_json: flags.Json = False) -> None:
    """Show a recipe: its claim, its methods, its settings and the paper's numbers."""
    from ...experiments import recipes
    from ...experiments.training.recipe import slug
    from ...experiments.training.tasks import task_named
    from ...planning.table import text_table

    recipe = recipes.recipe(name)
    if as_json:
        typer.echo(json.dumps(recipe.to_dict(), indent=1))
        return
    fields = recipe.to_dict()
    variants = [
        (
            slug(variant.label),
            variant.label,
            variant.method,
            "" if variant.method == "e2e" else f"K={variant.interval}, first={variant.begin}",
            variant.operator.label() if variant.operator else "",
        )
        for variant in recipe.variants
    ]
    printed = [
        (
            row.data,
            row.label,
            f"{row.score:.2f}",
            *(f"{value:.2f}" if value is not None else "" for value in rest),
        )
        for row in recipe.paper
        for rest in [(row.std, row.memory_gb, row.seconds_per_epoch)]
    ]
    lines = [
        recipes.about(name),
        "",
        "Methods",
        *text_table(("--method", "label", "method", "placement", "operator"), variants),
    ]
    if printed:
        head = ("data", "label", task_named(recipe.task).metric.name, "std", "memory GB", "s/epoch")
        lines += ["", "The paper's numbers", *text_table(head, printed, right=(2, 3, 4, 5))]
    shown = {key: value for key, value in fields.items() if key not in ("name", "variants", "paper")}
    lines += ["", "Settings", *(f"{key}: {_text(value)}" for key, value in shown.items())]
    typer.echo("\n".join(lines))


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{key}={_text(item)}" if not isinstance(item, dict) else f"{key} ({_text(item)})"
            for key, item in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
