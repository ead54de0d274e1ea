"""`replearn compare`: methods over seeds, trained where they are missing, in a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import ReplearnError
from ..flags import Data, DataRoot, Device, Epochs, Json, Out, Pretrained, Settings

if TYPE_CHECKING:
    from ...experiments.training.compare import Comparison
    from ...experiments.training.results import Result
    from ...experiments.training.run import RunSpec

COMPARISON = "replearn-comparison-1"


def compare(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name, or a file of your own.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Some of its rows, as e2e,removal,repl; all if not given.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, as 0,1,2 or 0-4.")] = "0,1,2",
    data: Data = None,
    epochs: Epochs = None,
    together: Annotated[
        int, typer.Option(min=1, help="Runs at once on the device: more in less time, but no times to compare.")
    ] = 1,
    equal_time: Annotated[
        bool, typer.Option("--equal-time", help="Add rows that train as long as E2E did, by the clock.")
    ] = False,
    device: Device = "auto",
    out: Out = None,
    pretrained: Pretrained = None,
    settings: Settings = None,
    data_root: DataRoot = None,
    read: Annotated[Path | None, typer.Option("--from", help="Only read the results below this folder.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the picture, as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds: train what is missing, then print the table.

    Accuracy is the last epoch's. Differences are taken seed by seed, with a 95 % interval and a
    verdict: better, worse or undecided. Stopped runs go on where they were.

    Examples:

    * `replearn compare demo`

    * `replearn compare t1_resnet32 --data cifar10 --methods e2e,removal,repl --seeds 0-4`

    * `replearn compare t1_resnet32 --seeds 0-9 --together 10`

    * `replearn compare tab_finetune_vit --pretrained vit_small.safetensors --equal-time`

    * `replearn compare --from runs/t1_resnet32 --json`
    """
    from ...experiments.report.overview import draw
    from ...experiments.training.compare import compare as compare_results
    from ...experiments.training.equal_time import at_equal_time, with_no_more_epochs
    from ..runs import data_of, leads, resolved, results_below, seeds_named, spec_of, variants_named

    if (recipe is None) == (read is None):
        raise ReplearnError(
            "Name a recipe (`replearn compare demo`), or a folder of results with --from: one of both."
        )
    if read is not None:
        comparisons = compare_results(results_below(read))
    else:
        assert recipe is not None
        chosen = resolved(recipe, epochs, settings or [], pretrained)
        on = data_of(chosen, data)
        rows = variants_named(chosen, methods)
        specs = [spec_of(chosen, row, on, seed, out, data_root) for seed in seeds_named(seeds) for row in rows]
        if equal_time and together > 1:
            raise ReplearnError("--equal-time needs times of their own: leave --together at 1.")
        results = results_of(specs, together, device)
        if equal_time:
            longer = at_equal_time(results)
            if (short := with_no_more_epochs(results, longer)) and leads():
                typer.echo(
                    f"No row at equal time: E2E's time pays for no epoch more of {', '.join(short)}.", err=True
                )
            more = [
                spec_of(chosen, row, on, seed, out, data_root) for seed in seeds_named(seeds) for row in longer
            ]
            results += results_of(more, 1, device)
        comparisons = compare_results(results)
    if not leads():
        return
    show(comparisons, as_json)
    if read is None:
        keep(comparisons[0], specs[0].out.parent.parent, picture)
    elif picture is not None:
        draw(only(comparisons, "a picture"), picture)


def results_of(specs: Sequence[RunSpec], together: int, device: str) -> list[Result]:
    """Every run's result: those that are there, and the others trained now, `together` at a time."""
    from ...experiments.training.fit import fit  # seconds to import, which help and reading need not wait for
    from ...experiments.training.tasks import task_named
    from ...experiments.training.trained import refuse_impossible_rows
    from ..progress import watching
    from ..runs import found

    results = {index: result for index, spec in enumerate(specs) if (result := found(spec)) and result.finished}
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
            trained = fit(chosen, device=device, resume=True, progress=progress, shared=data)
            results |= dict(zip(part, trained, strict=True))
    return [results[index] for index in range(len(specs))]


def show(comparisons: Sequence[Comparison], as_json: bool) -> None:
    from ...experiments.training.comparison_table import comparison_table

    if as_json:
        typer.echo(json.dumps([comparison.to_dict() for comparison in comparisons], indent=1))
    else:
        typer.echo("\n\n".join(comparison_table(comparison) for comparison in comparisons))


def keep(comparison: Comparison, folder: Path, picture: Path | None) -> None:
    """The comparison beside its runs: as text, as JSON and as a picture."""
    from ...experiments.report.collecting import Reader
    from ...experiments.report.examples import example_sheet
    from ...experiments.report.overview import draw
    from ...experiments.training.comparison_table import comparison_table
    from ...experiments.training.results import write_atomically

    write_atomically(folder / "comparison.txt", comparison_table(comparison) + "\n")
    write_atomically(
        folder / "comparison.json", json.dumps({"format": COMPARISON, **comparison.to_dict()}, indent=1)
    )
    if (sheet := example_sheet(folder, Reader(folder).read().runs)) is not None:
        (folder / "examples.png").write_bytes(sheet)
        typer.echo(f"What was found in test pictures is drawn in {folder / 'examples.png'}.", err=True)
    drawn = draw(comparison, picture or folder / "comparison.svg")
    typer.echo(f"The picture is {drawn}.", err=True)


def only(comparisons: Sequence[Comparison], what: str) -> Comparison:
    if len(comparisons) > 1:
        names = ", ".join(f"{comparison.recipe} on {comparison.data}" for comparison in comparisons)
        raise ReplearnError(
            f"There are several comparisons ({names}); for {what} name the folder of one with --from."
        )
    return comparisons[0]
