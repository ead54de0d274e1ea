"""`replearn analyze`: what replacing blocks of a trained model does to it, by the paper's theory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import ReplearnError
from ..flags import DataRoot, Device, Json


def analyze(
    run: Annotated[Path, typer.Argument(help="The folder of an end-to-end run of `replearn train`.")],
    interval: Annotated[int, typer.Option(help="Every K-th block.")] = 4,
    first: Annotated[
        int | None, typer.Option(help="Position of the first target; the interval if not given.")
    ] = None,
    targets: Annotated[str | None, typer.Option(help="Names of blocks, as layer3.1,layer3.3, instead.")] = None,
    operator: Annotated[
        str | None, typer.Option(help="An operator, as basic:correction=full; the paper's if not given.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit/--start", help="Operators fitted to the blocks, or with starting values.")
    ] = True,
    intervals: Annotated[str, typer.Option(help="Intervals of the trade-off curve.")] = "2,3,4,6,8",
    images: Annotated[
        int, typer.Option(min=2, help="Training images, or windows of text; a fifth is held out.")
    ] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a batch.")] = 100,
    starts: Annotated[int, typer.Option(min=1, help="Random starts of each power iteration.")] = 2,
    iterations: Annotated[int, typer.Option(min=1, help="Power iterations at most.")] = 30,
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Gradient bias too.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Which images, and the random starts.")] = 0,
    device: Device = "auto",
    data_root: DataRoot = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the files; RUN/analysis if not given.")] = None,
    picture: Annotated[str, typer.Option(help="png, svg, or none.")] = "png",
    as_json: Json = False,
) -> None:
    """Measure the paper's theory on a trained model.

    Local errors of the operators, suffix factors, the bound on the output's deviation beside the measured one,
    gradient bias, how near removed weights are to their neighbours' span, and the trade-off of K. Writes
    analysis.json and a picture, and prints tables.

    Examples:

    * `replearn train t1_resnet32 --method e2e --epochs 40`

    * `replearn analyze runs/t1_resnet32/cifar10/e2e/seed-0 --operator basic:correction=full`

    * `replearn analyze runs/t1_vit_tiny8/cifar10/e2e/seed-0 --first 2 --images 500 --device cuda`
    """
    import torch

    from ...analysis import analyze as analyze_model  # slow to import, which help need not wait for
    from ...analysis import draw
    from ...experiments.training.fit import device_named
    from ...experiments.training.results import write_atomically
    from ...experiments.training.trained import read_full_model
    from ...planning.planner import plan as plan_model

    if picture not in ("png", "svg", "none"):
        raise ReplearnError(f"--picture {picture}: write png, svg or none.")
    if images < 2 * batch_size:
        raise ReplearnError(
            f"--images {images} with --batch-size {batch_size} is fewer than two batches, and one is held out. "
            f"Write --batch-size {max(1, images // 5)}."
        )
    wanted = whole_numbers(intervals)
    trained = read_full_model(run, device_named(device), data_root)
    chosen = None if targets is None else [name.strip() for name in targets.split(",") if name.strip()]
    plan = plan_model(trained.model, interval, first, targets=chosen, operator=operator)
    torch.manual_seed(seed)
    found = analyze_model(
        trained.model,
        plan,
        trained.train_batches(images, batch_size, seed),
        forward=trained.forward,
        loss=trained.loss,
        score=trained.hits,
        fit=fit,
        gradients=gradients,
        intervals=wanted,
        first=first,
        starts=starts,
        iterations=iterations,
        seed=seed,
    )
    folder = out or (run if run.is_dir() else run.parent) / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "analysis.json", found.to_json())
    if as_json:
        typer.echo(found.to_json())
    else:
        typer.echo(f"{trained.name}\n{found}\n")
        typer.echo(folder / "analysis.json")
    if picture != "none":
        drawn = draw(found, folder / f"analysis.{picture}")
        if not as_json:
            typer.echo(drawn)


def whole_numbers(text: str) -> list[int]:
    """Intervals as `2,3,4`; nothing for none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) >= 2 for part in parts):
        raise ReplearnError(f"--intervals {text}: write whole numbers of at least 2, as 2,3,4.")
    return [int(part) for part in parts]
