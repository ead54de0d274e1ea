"""COCO's box metrics, by pycocotools.

`truth` is COCO's annotation data, `found` a list as a COCO results file holds it: image_id, category_id, bbox
(x, y, width, height), score.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

NAMES = ("map", "ap50", "ap75")


def coco_metrics(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """mAP, AP50 and AP75 in percent; 0 where nothing was found or there is nothing to find."""
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
