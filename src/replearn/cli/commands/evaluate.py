"""`replearn evaluate`: the test metrics of a run's deployed model, in INT8 too."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import flags

if TYPE_CHECKING:
    from ...experiments.training.trained import Trained


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    int8: Annotated[bool, typer.Option("--int8", help="INT8 beside float32, on the CPU.")] = False,
    samples: flags.Samples = 512,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile first: minutes, then INT8 runs several times as fast.")
    ] = False,
    data_root: flags.DataRoot = None,
    as_json: flags.Json = False,
) -> None:
    """Evaluate a trained model on its test set, deployed.

    Streamed sets, as ImageNet, are read to their end for the test and for SAMPLES calibration images alone.

    Examples:

    * `replearn evaluate runs/t2_resnet34/imagenet/repl/seed-0 --int8 --compile`
    """
    import torch

    from ...experiments.training.trained import read_trained

    trained = read_trained(run, torch.device("cpu"), data_root)
    found = measures_of(trained, int8=int8, images=samples, compile=compile)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(found["run"] + (f"; INT8: {found['int8']}, {found['calibration_images']} images" if int8 else ""))
    for side, measures in found["measures"].items():
        numbers = ", ".join(f"{name.removeprefix('test_')} {value:.4g}" for name, value in measures.items())
        typer.echo(f"{side:8s} {numbers}")


def measures_of(run: Trained, *, int8: bool, images: int, compile: bool = False) -> dict[str, Any]:
    """The test metrics of a run's model, deployed, in float32, and in INT8 calibrated on training images."""
    import torch

    from ...deployment.deploy import deploy
    from ...deployment.quantizing import quantize
    from ...fast.inference import streamline
    from ...surgery.plan_metadata import attached_plan

    model = run.model
    plain = deploy(model) if attached_plan(model) is not None else streamline(model)
    sides = {"float32": plain}
    found: dict[str, Any] = {"run": run.name}
    if int8:
        calibration = [x for x, _ in run.train_batches(images, 64)]
        sides["int8"], found["int8"] = quantize(plain, calibration)
        found["calibration_images"] = sum(map(len, calibration))
    found["measures"] = {}
    for name, side in sides.items():
        made: Any = torch.compile(side) if compile else side
        with torch.no_grad():
            found["measures"][name] = run.task.evaluate(made, nullcontext())
    return found
