"""`replearn analyze`: what replacing blocks of a trained model does to it, by the paper's theory."""

from __future__ import annotations

from dataclasses import replace
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
    iterations: Annotated[int, typer.Option(min=1, help="Power iterations at most.")] = 30,
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Gradient bias too.")] = True,
    convergence: Annotated[
        int,
        typer.Option(min=0, help="Steps of plain SGD from fresh weights, to measure the convergence bounds."),
    ] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of these steps.")] = 0.005,
    seed: Annotated[int, typer.Option(min=0, help="Which images, and the random starts.")] = 0,
    device: Device = "auto",
    data_root: DataRoot = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the files; RUN/analysis if not given.")] = None,
    picture: Annotated[bool, typer.Option("--picture/--no-picture", help="Draw it as SVG.")] = True,
    as_json: Json = False,
) -> None:
    """Measure the paper's theory on a trained model.

    Local errors of the operators, suffix factors, the bound on the output's deviation beside the measured one,
    gradient bias, how near removed weights are to their neighbours' span, and the trade-off of K; with
    --convergence both sides of the convergence bounds too. A streamed data set is read in part. Writes
    analysis.json and a picture, and prints tables.

    Examples:

    * `replearn train t1_resnet32 --method e2e --epochs 40`

    * `replearn analyze runs/t1_resnet32/cifar10/e2e/seed-0 --operator basic:correction=full`

    * `replearn analyze runs/t1_vit_tiny8/cifar10/e2e/seed-0 --first 2 --images 500 --device cuda`

    * `replearn analyze runs/demo/digits/e2e/seed-0 --first 2 --convergence 400`
    """
    import torch

    from ...analysis import analyze as analyze_model  # slow to import, which help need not wait for
    from ...analysis import converge
    from ...experiments.report.analysis_figure import write_analysis
    from ...experiments.training.fit import device_named
    from ...experiments.training.results import write_atomically
    from ...experiments.training.trained import read_full_model
    from ...planning.planner import plan as plan_model

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
    batches = trained.train_batches(images, batch_size, seed)
    found = analyze_model(
        trained.model,
        plan,
        batches,
        forward=trained.forward,
        loss=trained.loss,
        score=trained.hits,
        fit=fit,
        gradients=gradients,
        intervals=wanted,
        first=first,
        iterations=iterations,
        seed=seed,
    )
    if convergence:
        torch.manual_seed(seed)
        whole = [batch for batch in batches if len(batch[0]) == batch_size]
        reached = converge(
            trained.task.build().to(batches[0][0].device),
            plan,
            whole,
            loss=trained.loss,
            forward=trained.forward,
            lr=lr,
            steps=convergence,
            points=min(20, convergence),
            seed=seed,
        )
        found = replace(found, convergence=reached)
    folder = out or (run if run.is_dir() else run.parent) / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "analysis.json", found.to_json())
    if as_json:
        typer.echo(found.to_json())
    else:
        typer.echo(f"{trained.name}\n{found}\n")
        typer.echo(folder / "analysis.json")
    if picture:
        drawn = write_analysis(found, folder / "analysis.svg")
        if not as_json:
            typer.echo(drawn)


def whole_numbers(text: str) -> list[int]:
    """Intervals as `2,3,4`; nothing for none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) >= 2 for part in parts):
        raise ReplearnError(f"--intervals {text}: write whole numbers of at least 2, as 2,3,4.")
    return [int(part) for part in parts]
