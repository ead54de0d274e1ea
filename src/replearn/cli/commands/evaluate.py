"""`replearn evaluate`: the test metrics of a run's deployed model, in INT8 too, or COCO's of a results file."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import ReplearnError
from .. import flags

if TYPE_CHECKING:
    from ...experiments.training.trained import Trained


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_RESULTS", help="A run's folder, or a COCO results file as predictions.json."
        ),
    ],
    annotations: Annotated[
        Path | None, typer.Option(help="For a results file: the annotations, as instances_val2017.json.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="For a run: INT8 beside float32, on the CPU.")] = False,
    samples: flags.Samples = 512,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile first: minutes, then INT8 runs several times as fast.")
    ] = False,
    data_root: flags.DataRoot = None,
    as_json: flags.Json = False,
) -> None:
    """Evaluate a trained model on its test set, deployed; or what a detector found: mAP, AP50 and AP75.

    Streamed sets, as ImageNet, are read to their end for the test and for SAMPLES calibration images alone.
    A results file is evaluated by pycocotools: pip install 'replearn[scenes]'.

    Examples:

    * `replearn evaluate runs/t2_resnet34/imagenet/repl/seed-0 --int8 --compile`
    * `replearn evaluate runs/bccd_retinanet/bccd/repl/seed-0/predictions.json --annotations instances_test.json`
    """
    if source.is_dir():
        if annotations is not None:
            raise ReplearnError(f"--annotations is for a results file, and {source} is a folder: leave it out.")
        evaluate_run(source, int8, samples, compile, data_root, as_json)
    elif annotations is None:
        raise ReplearnError(f"{source} is no folder of a run; for a COCO results file add --annotations FILE.")
    else:
        evaluate_results(source, annotations, as_json)


def evaluate_run(run: Path, int8: bool, samples: int, compile: bool, root: Path | None, as_json: bool) -> None:
    import torch

    from ...experiments.training.trained import read_trained

    trained = read_trained(run, torch.device("cpu"), root)
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


def evaluate_results(results: Path, annotations: Path, as_json: bool) -> None:
    from ...experiments.training.coco_metrics import coco_metrics, read_results_file
    from ...experiments.training.data.sets.coco import as_truth, read_annotations

    found, truth = read_results_file(results), read_annotations(annotations)
    pictures, classes = ({entry["id"] for entry in truth[part]} for part in ("images", "categories"))
    for entry in found:
        if entry["image_id"] not in pictures or entry["category_id"] not in classes:
            raise ReplearnError(
                f"{results} is not about {annotations}: it has picture {entry['image_id']} with category "
                f"{entry['category_id']}, which are not both listed there. Use the annotations of these pictures."
            )
    real = {**truth, "annotations": [as_truth(entry) for entry in truth["annotations"]]}
    measures = coco_metrics(real, found)
    if as_json:
        typer.echo(json.dumps(measures))
        return
    numbers = ", ".join(f"{name} {value:.2f} %" for name, value in measures.items())
    typer.echo(f"{numbers}; {len(found):,} boxes in {len(pictures):,} pictures, by pycocotools")
