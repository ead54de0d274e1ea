"""`replearn plan`: which blocks of a model would be replaced, and what that costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import ReplearnError
from .. import flags

if TYPE_CHECKING:
    import torch
    from torch import nn


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="resnet110, vit_small_16, lm:512:12:8:2048, timm:NAME, hf:gpt2, FILE.py:FUNCTION, ..."
        ),
    ] = None,
    interval: flags.Interval = 4,
    first: flags.First = None,
    fraction: Annotated[
        float | None, typer.Option(help="Replace this share of the blocks, spread evenly, instead of an interval.")
    ] = None,
    targets: flags.Targets = None,
    operator: flags.Operator = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Choose the targets by a budget: latency<=75%, parameters<=60%, flops<=70%, blocks=12."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="The folder of an end-to-end run, instead of a model's name.")
    ] = None,
    score: Annotated[
        str, typer.Option(help="Which blocks the budget takes: count (spread evenly); with --run similarity.")
    ] = "count",
    samples: flags.Samples = 500,
    device: flags.Device = "auto",
    data_root: flags.DataRoot = None,
    gpu: flags.Gpu = None,
    probe: flags.Probe = False,
    batch_size: flags.BatchSize = 64,
    length: flags.Length = 128,
    precision: Annotated[str, typer.Option(help="float32, tf32, bfloat16 or float16.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd_momentum, sgd, lion, ...")] = "adamw",
    as_json: flags.Json = False,
) -> None:
    """Show which blocks of a model would be replaced, by what, and what it saves.

    The model is built without weights, so large ones cost nothing. Parameters, FLOPs and (with --gpu or --probe)
    time, while training and once deployed, and training memory are predicted from shapes alone. A budget of
    latency, parameters or flops is of the deployed model, one of memory, activations or time of a training step.
    --json prints the plan, without the costs.

    Examples:

    * `replearn plan resnet110`
    * `replearn plan vit_small_16 --first 2 --gpu H200 --precision bfloat16`
    * `replearn plan torchvision:resnet50 --first 2 --operator reduced_bottleneck`
    * `replearn plan resnet34 --budget "memory<=85%" --batch-size 256`
    * `replearn plan timm:convnext_tiny --fraction 0.2 --json`
    * `replearn plan hf:gpt2 --first 2 --length 1024 --batch-size 8 --precision bfloat16 --gpu A100`
    * `replearn plan --run runs/t1_resnet32/cifar10/e2e/seed-0 --budget "time<=85%" --score similarity --gpu H200`
    """
    from ...costs import estimate, named_machine
    from ...costs import probe as probe_machine
    from ...costs.budgets import as_budgets
    from ...costs.estimator import Terms
    from ...fitting.plan import SCORES, plan_within
    from ...operators._base.options import options_named
    from ...planning.planner import plan as plan_model

    if gpu is not None and probe:
        raise ReplearnError("--gpu names a machine and --probe measures this one: give one of them.")
    machine = named_machine(gpu) if gpu is not None else probe_machine() if probe else None
    options = None if operator is None else options_named(operator)
    terms: dict[str, Any] = {"optimizer": optimizer, "precision": precision, "machine": machine}
    network, example, data = subject_of(model, run, batch_size, length, samples, device, data_root)
    if score not in SCORES:
        raise ReplearnError(f"--score {score}: write one of {', '.join(SCORES)}.")
    if score != "count" and (budget is None or data is None):
        raise ReplearnError(
            f"--score {score} says which blocks a budget takes, and looks at a trained model: give --budget and "
            "--run, the folder of an end-to-end run of `replearn train`."
        )
    if budget is not None:
        asked = as_budgets(budget)
        if (interval, first, fraction, targets) != (4, None, None, None):
            raise ReplearnError(
                "--budget chooses the targets; leave out --interval, --first, --fraction, --targets."
            )
        if machine is None and any(each.quantity in ("latency", "time") for each in asked):
            raise ReplearnError(
                f"--budget {budget} needs to know the machine: give --gpu H100, or --probe on the machine itself."
            )
        found = plan_within(network, asked, example, options, Terms(**terms), score, data)
    else:
        found = plan_model(network, interval, first, fraction=fraction, targets=targets, operator=options)
    if as_json:
        typer.echo(found.to_json())
        return
    try:
        costs = str(estimate(network, example, found, **terms))
    except ReplearnError as error:
        if terms != {"optimizer": "adamw", "precision": "float32", "machine": None}:
            raise
        costs = f"note     its costs can't be predicted: {error}"
    typer.echo(re.sub(r"operator='(\w+)'", r"--operator \1", f"{found}\n\n{costs}"))


def subject_of(
    model: str | None, run: Path | None, batch: int, length: int, samples: int, device: str, root: Path | None
) -> tuple[nn.Module, Any, list[torch.Tensor] | None]:
    """A named model without weights, or a run's with batches of its data; and a step's batch for either."""
    import torch

    from ..subjects import subject_named

    if (model is None) == (run is None):
        raise ReplearnError("Name a model, as `replearn plan resnet110`, or a run with --run FOLDER: one of them.")
    if run is None:
        given = (("--device", device, "auto"), ("--samples", samples, 500), ("--data-root", root, None))
        for flag, value, default in given:
            if value != default:
                raise ReplearnError(
                    f"{flag} {value}: a named model is planned from shapes alone, without a device or data. "
                    f"Leave {flag} out, or give --run, the folder of an end-to-end run."
                )
        return *subject_named(str(model), batch, length), None
    from ...experiments.training.fit import device_named  # slow to import, which a plan by name need not wait for
    from ...experiments.training.trained import read_full_model

    trained = read_full_model(run, device_named(device), root)
    data = [inputs for inputs, _ in trained.train_batches(samples, max(1, min(100, samples // 5)))]
    example = torch.empty(batch, *data[0].shape[1:], dtype=data[0].dtype, device="meta")
    return trained.model, example, data
