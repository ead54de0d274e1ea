"""TF32 or full float32, for a while: torch has old switches and new ones for it, and refuses to read a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch


@contextmanager
def float32_as(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Compute products and convolutions of float32 in full, or in TF32; afterwards every switch is as before.

    Old switches (`allow_tf32`, `set_float32_matmul_precision`) are set beside the new ones (`fp32_precision`), for
    compilers read them; where a user's own contradict each other, only the new are put back.
    """
    cudnn: Any = torch.backends.cudnn
    fast, places = precision == "tf32", switches(precision)
    before = [place.fp32_precision for place in places]
    product, convolution = readable(torch.get_float32_matmul_precision), readable(lambda: cudnn.allow_tf32)
    torch.set_float32_matmul_precision("high" if fast else "highest")
    cudnn.allow_tf32 = fast
    for place in places:
        place.fp32_precision = precision
    try:
        yield
    finally:
        if product is not None:
            torch.set_float32_matmul_precision(product)
        if convolution is not None:
            cudnn.allow_tf32 = convolution
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = "none"  # as torch.backends.fp32_precision says, where it was so before
            if place.fp32_precision != value:
                place.fp32_precision = value


def switches(precision: Literal["ieee", "tf32"]) -> list[Any]:
    """What has a setting of its own; convolutions on a CPU are only ever asked to be exact."""
    backends: Any = torch.backends
    found = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    return found if precision == "tf32" else [*found, backends.mkldnn.conv]


def readable(setting: Callable[[], Any]) -> Any:
    """The setting, or None where torch won't say because old and new switches were mixed."""
    try:
        return setting()
    except RuntimeError:
        return None
