"""Load a data set that lies in COCO's layout: NAME/PART/*.jpg and NAME/annotations/instances_PART.json."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ....errors import ReplearnError
from .coco import read_part
from .defects import Defects
from .places import locate
from .scenes import DetectionSet
from .source import Source


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which parts of a data set are trained on and tested on."""

    train: str
    test: str

    @property
    def signs(self) -> tuple[str, ...]:
        return tuple(f"annotations/instances_{part}.json" for part in (self.train, self.test))


COCO_2017 = Parts(train="train2017", test="val2017")


def load_parts(
    source: Source,
    parts: Parts,
    root: str | os.PathLike[str] | None,
    strict_counts: bool = True,
    defects: Defects | None = None,
) -> DetectionSet:
    """The data set; `defects` says whether a wrong box or a missing picture ends it or is left out."""
    folder, _ = locate(source, root)
    defects = defects if defects is not None else Defects()
    file = folder / "annotations" / "instances_{}.json"
    train, _, categories = read_part(file.with_name(file.name.format(parts.train)), folder / parts.train, defects)
    test, truth, _ = read_part(
        file.with_name(file.name.format(parts.test)), folder / parts.test, defects, categories
    )
    expected = (("training", len(train), source.num_train), ("test", len(test), source.num_test))
    for which, found, right in expected:
        if strict_counts and defects.policy == "refuse" and found != right:
            raise ReplearnError(
                f"{folder} lists {found:,} {which} pictures, and {source.title} has {right:,}. {source.how}"
            )
    return DetectionSet(name=source.name, categories=categories, train=train, test=test, truth=truth)
