"""Rows at equal time: a cheaper method gets the epochs that E2E's time would pay for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import ReplearnError
from .comparable import machine, shared
from .intervals import mean_of
from .recipe import Variant, variant_from_dict
from .results import Result


def at_equal_time(results: Sequence[Result]) -> list[Variant]:
    """Every cheaper row once more, with as many epochs as E2E's time pays for, to the nearest.

    Its schedule is stretched with it. ReplearnError where the times say nothing: no E2E among the results, a
    shared device, different hardware.
    """
    full = [result for result in results if result.variant["method"] == "e2e"]
    if not full:
        raise ReplearnError("--equal-time measures against E2E, which is not among the methods; add it.")
    if any(shared(result) for result in results) or len({machine(result) for result in results}) > 1:
        raise ReplearnError("--equal-time needs runs that were trained one at a time on the same hardware.")
    budget = mean_of([result.epoch_seconds for result in full])
    rows = {str(result.variant["label"]): result.variant for result in results if result not in full}
    longer = []
    for label, variant in rows.items():
        seconds = mean_of([r.epoch_seconds for r in results if r.variant["label"] == label])
        epochs = round(int(full[0].recipe["epochs"]) * budget / seconds)
        if epochs > int(full[0].recipe["epochs"]):
            row = variant_from_dict(variant)
            longer.append(replace(row, label=f"{label} at equal time", epochs=epochs))
    return longer
