"""`replearn compare`: methods over seeds, trained where they are missing, in a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import ReplearnError
from .. import flags

if TYPE_CHECKING:
    from ...experiments.training.compare import Comparison
    from ...experiments.training.packed import Kept
    from ...experiments.training.results import Result
    from ...experiments.training.run import RunSpec


def compare(
    recipe: Annotated[
        list[str] | None, typer.Argument(help="Recipes' names, or files of your own, in order of importance.")
    ] = None,
    methods: flags.Methods = None,
    seeds: flags.Seeds = None,
    data: flags.Data = None,
    epochs: flags.Epochs = None,
    together: Annotated[
        int, typer.Option(min=1, help="Runs at once on the device: more in less time, but no times to compare.")
    ] = 1,
    equal_time: Annotated[
        bool, typer.Option("--equal-time", help="Add rows that train as long as E2E did, by the clock.")
    ] = False,
    device: flags.Device = "auto",
    logger: flags.Logger = None,
    out: flags.Out = None,
    pretrained: flags.Pretrained = None,
    settings: flags.Settings = None,
    data_root: flags.DataRoot = None,
    read: Annotated[
        Path | None, typer.Option("--from", help="Only read the results of this file, or below this folder.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="A file of runs: those in it count as trained, new ones join."),
    ] = None,
    picture: flags.Picture = None,
    as_json: flags.Json = False,
) -> None:
    """Compare methods over seeds: train what is missing, then print the table.

    Accuracy is the last epoch's. Differences are taken seed by seed, with a 95 % interval and a
    verdict: better, worse or undecided. Stopped runs go on where they were. With `--into` the file holds every
    run as soon as it ends: take it to another machine, and the same command trains the rest there.

    Examples:

    * `replearn compare demo`
    * `replearn compare t1_resnet32 --data cifar10 --methods e2e,removal,repl --seeds 0-4`
    * `replearn compare t1_resnet32 --seeds 0-9 --together 10`
    * `replearn compare tab_finetune_vit --pretrained vit_small.safetensors --equal-time`
    * `replearn compare t1_resnet32 t1_vit_tiny8 --data cifar10 --seeds 0-4 --into cifar10.jsonl`
    * `replearn compare --from runs/t1_resnet32 --json`
    """
    from ...experiments.report.figures import draw
    from ...experiments.training.comparable import at_equal_time
    from ...experiments.training.compare import compare as compare_results
    from ...experiments.training.packed import Kept
    from ..runs import data_of, leads, resolved, results_below, seeds_named, spec_of, variants_named

    names = [name for text in recipe or () for name in text.split(",") if name]
    if bool(names) == (read is not None):
        raise ReplearnError(
            "Name a recipe (`replearn compare demo`), or a folder of results with --from: one of both."
        )
    if equal_time and together > 1:
        raise ReplearnError("--equal-time needs times of their own: leave --together at 1.")
    kept = Kept(into, writes=leads())
    if read is not None:
        results = results_below(read)
        kept.add(results)
        comparisons = compare_results(results)
        show(comparisons, as_json)
        if picture is not None and str(picture) != "none":
            if len(comparisons) > 1:
                raise ReplearnError("--picture is of one comparison: name the folder of one with --from.")
            draw(comparisons[0], picture)
        return
    if picture is not None and len(names) > 1:
        raise ReplearnError("--picture is of one recipe: name one, or leave it out.")
    comparisons = []
    recipes = [resolved(name, epochs, settings or [], pretrained) for name in names]
    plans = [(each, data_of(each, data), variants_named(each, methods)) for each in recipes]
    for chosen, on, rows in plans:  # what is wrong with one is told before any is trained
        folder = out / chosen.name if out is not None and len(names) > 1 else out
        specs = [spec_of(chosen, row, on, seed, folder, data_root) for seed in seeds_named(seeds) for row in rows]
        results = results_of(specs, together, device, kept, logger)
        if equal_time:
            longer = at_equal_time(results)
            more = [(row, seed) for seed in seeds_named(seeds) for row in longer]
            specs = [spec_of(chosen, row, on, seed, folder, data_root) for row, seed in more]
            results += results_of(specs, 1, device, kept, logger)
        comparisons += compare_results(results)
        if leads():
            keep(comparisons[-1], (folder or Path("runs") / chosen.name) / on, picture)
    if leads():
        show(comparisons, as_json)


def results_of(
    specs: Sequence[RunSpec], together: int, device: str, kept: Kept, logger: str | None
) -> list[Result]:
    """Every run's result: those that are there, and the others trained now, `together` at a time."""
    from ...experiments.training.fit import fit  # seconds to import, which help and reading need not wait for
    from ...experiments.training.tasks import task_named
    from ...experiments.training.trained import refuse_impossible_rows
    from ..progress import watching
    from ..runs import found

    results: dict[int, Result] = {}
    for index, spec in enumerate(specs):
        held = kept.runs.get((spec.recipe.name, spec.data, spec.variant.label, spec.seed))
        if (result := found(spec, held)) and result.finished:
            results[index] = result
    kept.add(list(results.values()))
    missing = [index for index in range(len(specs)) if index not in results]
    if not specs:
        return []
    refuse_impossible_rows([specs[index] for index in missing])
    longest = max(spec.epochs for spec in specs)
    data: dict[Any, Any] = {}
    with watching(len(missing), longest, task_named(specs[0].recipe.task)) as progress:
        for start in range(0, len(missing), together):
            part = missing[start : start + together]
            chosen = [specs[index] for index in part]
            trained = fit(chosen, device=device, resume=True, progress=progress, shared=data, logger=logger)
            kept.add(trained)
            results |= dict(zip(part, trained, strict=True))
    return [results[index] for index in range(len(specs))]


def show(comparisons: Sequence[Comparison], as_json: bool) -> None:
    from ...experiments.training.comparison_table import comparison_table

    if as_json:
        typer.echo(json.dumps([comparison.to_dict() for comparison in comparisons], indent=1))
    else:
        typer.echo("\n\n".join(comparison_table(comparison) for comparison in comparisons))


def keep(comparison: Comparison, folder: Path, picture: Path | None) -> None:
    """The comparison beside its runs: as text and as a picture."""
    from ...experiments.report.figures import draw
    from ...experiments.training.comparison_table import comparison_table
    from ...experiments.training.results import write_atomically

    folder.mkdir(parents=True, exist_ok=True)  # it may be that no run was trained here
    write_atomically(folder / "comparison.txt", comparison_table(comparison) + "\n")
    if str(picture) == "none":
        return
    drawn = draw(comparison, picture or folder / "comparison.svg")
    typer.echo(f"The picture is {drawn}.", err=True)
