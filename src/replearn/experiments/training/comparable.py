"""Checks that runs can be compared: the same settings and hardware. Rows at equal training time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from ...errors import ReplearnError
from ...planning.serialization import decode
from .recipe import Variant
from .results import SHARED, Result

NOT_SETTINGS = ("name", "table", "data", "variants", "paper")  # what may differ between comparable runs


def check_same_settings(name: str, results: Sequence[Result]) -> None:
    variants: dict[str, Mapping[str, Any]] = {}
    for result in results:
        for field, before, after in differences(results[0].recipe, result.recipe):
            raise ReplearnError(
                f"These runs of {name} can't be compared: {field} is {before!r} in one and {after!r} in another. "
                "Train them alike, or keep them in folders of their own (--out)."
            )
        label = str(result.variant["label"])
        if (held := variants.setdefault(label, result.variant)) != result.variant:
            field = next(key for key in {**held, **result.variant} if held.get(key) != result.variant.get(key))
            raise ReplearnError(
                f"Two runs of {name} are both called {label}, but {field} is {held.get(field)!r} in one and "
                f"{result.variant.get(field)!r} in the other. Keep them in folders of their own (--out)."
            )


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The settings of two recipes that differ, as (field, one's, the other's)."""
    fields = [field for field in {**one, **other} if field not in NOT_SETTINGS]
    return [(field, one.get(field), other.get(field)) for field in fields if one.get(field) != other.get(field)]


def changes_of(trained: Mapping[str, Any]) -> list[str]:
    """Notes on settings that differ from the shipped recipe, whose paper rows then do not apply."""
    from .. import recipes

    if trained.get("name") not in recipes.available():
        return []
    shipped = recipes.recipe(str(trained["name"])).to_dict()
    return [
        f"not the recipe as it is shipped: {field} is {now}, not {then}"
        for field, then, now in differences(shipped, trained)
    ]


def shared(result: Result) -> bool:
    """Whether other runs trained on the device at the same time."""
    return SHARED in result.notes


def machine(result: Result) -> str:
    about = result.hardware
    processes = int(about.get("processes", 1))
    name = str(about.get("gpu") or f"{about.get('device', '?')}, {about.get('cores', '?')} cores")
    return name if processes == 1 else f"{processes} x {name}"


def at_equal_time(results: Sequence[Result]) -> list[Variant]:
    """A copy of every cheaper row with as many epochs as fit into E2E's time, rounded.

    The schedule is stretched. ReplearnError if the times can't be compared: no E2E among the results, a shared
    device, different hardware.
    """
    times: dict[str, list[float]] = {}
    rows = {str(result.variant["label"]): decode(Variant, result.variant, "variant") for result in results}
    for result in results:
        times.setdefault(str(result.variant["label"]), []).append(result.epoch_seconds)
    full = next((label for label, row in rows.items() if row.method == "e2e"), None)
    if full is None:
        raise ReplearnError("--equal-time measures against E2E, which is not among the methods; add it.")
    if any(shared(result) for result in results) or len({machine(result) for result in results}) > 1:
        raise ReplearnError("--equal-time needs runs that were trained one at a time on the same hardware.")
    epochs = int(results[0].recipe["epochs"])
    paid = {label: round(epochs * fmean(times[full]) / fmean(times[label])) for label in rows}
    return [
        replace(row, label=f"{label} at equal time", epochs=paid[label])
        for label, row in rows.items()
        if row.method != "e2e" and paid[label] > epochs
    ]
