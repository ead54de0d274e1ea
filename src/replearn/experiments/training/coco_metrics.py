"""COCO's box metrics, by pycocotools.

`truth` is COCO's annotation data, `found` a list as a COCO results file holds it: image_id, category_id, bbox
(x, y, width, height), score.
"""

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import ReplearnError

NAMES = ("map", "ap50", "ap75")


def coco_metrics(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """mAP, AP50 and AP75 in percent; 0 where nothing was found or there is nothing to find."""
    need_pycocotools()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not found or not truth["annotations"]:
        return dict.fromkeys(NAMES, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        coco = COCO()
        coco.dataset = {"info": {}, **truth, "annotations": [dict(entry) for entry in truth["annotations"]]}
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes([dict(entry) for entry in found]), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: 100 * max(0.0, float(value)) for name, value in zip(NAMES, run.stats[:3], strict=True)}


def need_pycocotools() -> None:
    if find_spec("pycocotools") is None:
        raise ReplearnError("mAP needs pycocotools, which is not installed: pip install 'replearn[scenes]'.")


FIELDS = ("image_id", "category_id", "bbox", "score")


def read_results_file(path: Path) -> list[dict[str, Any]]:
    """What was found, by a COCO results file; ReplearnError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReplearnError(f"Can't read the results file {path}: {error}.") from error
    if not isinstance(found, list):
        raise ReplearnError(f"{path} is not a COCO results file: it holds a {type(found).__name__} and no list.")
    for place, entry in enumerate(found):
        missing = [name for name in FIELDS if not isinstance(entry, dict) or name not in entry]
        if missing:
            raise ReplearnError(
                f"{path} is not a COCO results file: entry {place} has no {missing[0]}. Every entry holds "
                f"{', '.join(FIELDS)}."
            )
    return found
