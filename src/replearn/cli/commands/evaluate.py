"""`replearn evaluate`: COCO's metrics of a results file, on a machine that has the annotations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...errors import ReplearnError
from .. import flags


def evaluate(
    results: Annotated[Path, typer.Argument(help="A COCO results file, as a run's predictions.json.")],
    annotations: Annotated[
        Path, typer.Option(help="The annotation file of the pictures, as instances_val2017.json.")
    ],
    as_json: flags.Json = False,
) -> None:
    """Evaluate what a detector found: mAP, AP50 and AP75 in percent.

    By pycocotools: pip install 'replearn[scenes]'.

    Examples:

    * `replearn evaluate runs/bccd_retinanet/bccd/repl/seed-0/predictions.json --annotations instances_test.json`
    """
    from ...experiments.training.coco_metrics import coco_metrics, read_results_file
    from ...experiments.training.data.coco import as_truth, read_annotations

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
