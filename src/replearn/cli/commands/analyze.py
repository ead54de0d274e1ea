"""`replearn analyze`: what replacing blocks of a trained model does to it, by the paper's theory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import ReplearnError
from .. import flags


def analyze(
    run: Annotated[Path, typer.Argument(help="The folder of an end-to-end run of `replearn train`.")],
    interval: flags.Interval = 4,
    first: flags.First = None,
    targets: flags.Targets = None,
    operator: flags.Operator = None,
    samples: flags.Samples = 1000,
    batch_size: flags.BatchSize = 100,
    iterations: Annotated[int, typer.Option(min=1, help="Power iterations at most.")] = 30,
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Gradient bias too.")] = True,
    convergence: Annotated[
        int, typer.Option(min=0, help="Steps of plain SGD from fresh weights, to measure the convergence bounds.")
    ] = 0,
    seed: flags.Seed = 0,
    device: flags.Device = "auto",
    data_root: flags.DataRoot = None,
    out: Annotated[Path | None, flags.out("Folder of the files; RUN/analysis if not given.")] = None,
    picture: flags.Picture = None,
    as_json: flags.Json = False,
) -> None:
    """Measure the paper's theory on a trained model.

    Local errors of the operators, suffix factors, the bound on the output's deviation beside the measured one,
    gradient bias, and how near removed weights are to their neighbours' span; with --convergence both sides of the
    convergence bounds too. A streamed data set is read in part. Writes
    analysis.json and a picture, and prints tables.

    Examples:

    * `replearn train t1_resnet32 --method e2e --epochs 40`
    * `replearn analyze runs/t1_resnet32/cifar10/e2e/seed-0 --operator basic:correction=full`
    * `replearn analyze runs/t1_vit_tiny8/cifar10/e2e/seed-0 --first 2 --samples 500 --device cuda`
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

    if samples < 2 * batch_size:
        raise ReplearnError(
            f"--samples {samples} with --batch-size {batch_size} is fewer than two batches, and one is held out. "
            f"Write --batch-size {max(1, samples // 5)}."
        )
    trained = read_full_model(run, device_named(device), data_root)
    plan = plan_model(trained.model, interval, first, targets=targets, operator=operator)
    torch.manual_seed(seed)
    batches = trained.train_batches(samples, batch_size, seed)
    how: dict[str, Any] = {"forward": trained.forward, "loss": trained.loss, "seed": seed}
    found = analyze_model(trained.model, plan, batches, **how, gradients=gradients, iterations=iterations)
    if convergence:
        torch.manual_seed(seed)
        whole = [batch for batch in batches if len(batch[0]) == batch_size]
        fresh = trained.task.build().to(batches[0][0].device)
        how |= {"lr": 0.005, "steps": convergence, "points": min(20, convergence)}
        found = replace(found, convergence=converge(fresh, plan, whole, **how))
    folder = out or (run if run.is_dir() else run.parent) / "analysis"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "analysis.json", found.to_json())
    if as_json:
        typer.echo(found.to_json())
    else:
        typer.echo(f"{trained.name}\n{found}\n")
        typer.echo(folder / "analysis.json")
    if str(picture) != "none":
        drawn = write_analysis(found, picture or folder / "analysis.svg")
        if not as_json:
            typer.echo(drawn)
