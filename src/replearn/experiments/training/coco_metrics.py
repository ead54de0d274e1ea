"""COCO's box metrics: by pycocotools where it is installed, else by the same arithmetic here.

Both give the same numbers, and the tests hold one against the other. `truth` is COCO's annotation data, `found` a
list as a COCO results file holds it: image_id, category_id, bbox (x, y, width, height), score.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ReplearnError
from .results import write_atomically

Numbers = NDArray[np.float64]
THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = 100  # boxes of a class in a picture that count
NAMES = ("map", "ap50", "ap75")


def coco_metrics(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """mAP, AP50 and AP75 in percent; 0 where nothing was found or there is nothing to find."""
    if not found or not truth["annotations"]:
        return dict.fromkeys(NAMES, 0.0)
    return by_pycocotools(truth, found) if find_spec("pycocotools") else by_replearn(truth, found)


def by_pycocotools(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The official evaluation."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints as it goes
        coco = COCO()
        coco.dataset = {"info": {}, **truth, "annotations": [dict(entry) for entry in truth["annotations"]]}
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes([dict(entry) for entry in found]), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: 100 * max(0.0, float(value)) for name, value in zip(NAMES, run.stats[:3], strict=True)}


def by_replearn(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The same without pycocotools."""
    pictures = sorted({entry["id"] for entry in truth["images"]})
    there, said = grouped(truth["annotations"]), grouped(found)
    curves = []
    for category in sorted({entry["id"] for entry in truth["categories"]}):
        parts = [match(there[category, picture], said[category, picture]) for picture in pictures]
        curve = precision_curve([part for part in parts if part is not None])
        if curve is not None:
            curves.append(curve)
    if not curves:
        return dict.fromkeys(NAMES, 0.0)
    means = np.stack(curves).mean(axis=(0, 2))  # by threshold
    values = (means.mean(), means[0], means[5])
    return {name: 100 * float(value) for name, value in zip(NAMES, values, strict=True)}


def grouped(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], list[Mapping[str, Any]]]:
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        groups[entry["category_id"], entry["image_id"]].append(entry)
    return groups


Matched = tuple[Numbers, NDArray[np.bool_], NDArray[np.bool_], int]  # scores, hit and void by threshold, to find


def match(there: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> Matched | None:
    """Which boxes of one class in one picture hit something, at each threshold; the surest choose first.

    A box in a crowd counts neither for nor against, and a crowd may be hit any number of times.
    """
    if not there and not said:
        return None
    crowd = np.array([bool(entry["iscrowd"]) for entry in there], dtype=bool)
    order = np.argsort(crowd, kind="mergesort")
    crowd = crowd[order]
    scores = np.array([entry["score"] for entry in said], dtype=np.float64)
    best = np.argsort(-scores, kind="mergesort")[:MOST]
    boxes = np.array([said[i]["bbox"] for i in best], dtype=np.float64).reshape(-1, 4)
    real = np.array([there[i]["bbox"] for i in order], dtype=np.float64).reshape(-1, 4)
    ious = overlaps(boxes, real, crowd)
    count = len(THRESHOLDS)
    hit, void = np.zeros((count, len(best)), dtype=bool), np.zeros((count, len(best)), dtype=bool)
    free = np.ones((count, len(real)), dtype=bool)
    at_least = np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]
    rows = np.arange(count)
    for place in range(len(best) if len(real) else 0):
        able = free & (ious[place] >= at_least)
        for some, voids in ((able & ~crowd, False), (able & crowd, True)):
            worth = np.where(some, ious[place], -1.0)
            last = len(real) - 1 - worth[:, ::-1].argmax(axis=1)  # of equals the last, as pycocotools takes it
            now = (worth[rows, last] >= 0) & ~hit[:, place]
            hit[now, place] = True
            void[now, place] = voids
            if not voids:
                free[rows[now], last[now]] = False
    return scores[best], hit, void, int((~crowd).sum())


def overlaps(boxes: Numbers, real: Numbers, crowd: NDArray[np.bool_]) -> Numbers:
    """Intersection over union; for a crowd, the share of the box that lies in it."""
    low = np.maximum(boxes[:, None, :2], real[None, :, :2])
    high = np.minimum(boxes[:, None, :2] + boxes[:, None, 2:], real[None, :, :2] + real[None, :, 2:])
    inside = np.clip(high - low, 0, None).prod(axis=2)
    own, other = boxes[:, 2:].prod(axis=1)[:, None], real[:, 2:].prod(axis=1)[None]
    union = np.where(crowd[None], own, own + other - inside)
    shares: Numbers = np.divide(inside, union, out=np.zeros_like(inside), where=union > 0)
    return shares


def precision_curve(parts: Sequence[Matched]) -> Numbers | None:
    """Precision by threshold and recall of one class; None where there is nothing of it to find."""
    to_find = sum(part[3] for part in parts)
    if not to_find:
        return None
    scores = np.concatenate([part[0] for part in parts])
    order = np.argsort(-scores, kind="mergesort")
    hit, void = (np.concatenate([part[at] for part in parts], axis=1)[:, order] for at in (1, 2))
    right, wrong = (hit & ~void).cumsum(axis=1), (~hit & ~void).cumsum(axis=1)
    curve = np.zeros((len(THRESHOLDS), len(RECALLS)))
    for row, (tp, fp) in enumerate(zip(right.astype(float), wrong.astype(float), strict=True)):
        precision = tp / (tp + fp + np.spacing(1))
        precision = np.maximum.accumulate(precision[::-1])[::-1]  # never lower than at a higher recall
        places = np.searchsorted(tp / to_find, RECALLS, side="left")
        inside = places < len(precision)
        curve[row, inside] = precision[places[inside]]
    return curve


FIELDS = ("image_id", "category_id", "bbox", "score")


def write_results_file(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write what was found, as COCO's servers and pycocotools take it."""
    write_atomically(path, json.dumps(list(found)))


def read_results_file(path: Path) -> list[dict[str, Any]]:
    """Read it back; ReplearnError for a file that is no COCO results file."""
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
