"""The precision of float32 products: float32, or TF32, which rounds their operands to ten bits.

torch has two generations of switches for it, and the getters of the older one raise if a user has set the newer
(`torch.backends.cuda.matmul.fp32_precision`). So the newer ones are read, and both are set.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..blocks.global_settings import GlobalSetting, Undo

_backends: Any = torch.backends
_products = GlobalSetting()


def float32_products(*, tf32: bool, benchmark: bool | None = None) -> AbstractContextManager[None]:
    """Inside, float32 products are in TF32 or in float32, and cuDNN searches for kernels or not; then restored.

    A switch that has the wanted value is not set: cuDNN's follow `torch.backends.fp32_precision` until they are
    set for the first time, which can't be undone.
    """
    return _products.changed(lambda: _set(tf32, benchmark))


def _set(tf32: bool, benchmark: bool | None) -> Undo:
    switches = [_backends.cuda.matmul, _backends.mkldnn.matmul, _backends.cudnn.conv, _backends.cudnn.rnn]
    switches += [] if tf32 else [_backends.mkldnn.conv]  # TF32 is never asked of convolutions on a CPU
    before = [switch.fp32_precision for switch in switches]
    matmul, convolution = (
        get_or_none(torch.get_float32_matmul_precision),
        get_or_none(lambda: _backends.cudnn.allow_tf32),
    )
    searched, wanted = _backends.cudnn.benchmark, "tf32" if tf32 else "ieee"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if convolution is not tf32:
        _backends.cudnn.allow_tf32 = tf32
    for switch in switches:
        if switch.fp32_precision != wanted:
            switch.fp32_precision = wanted
    if benchmark is not None:
        _backends.cudnn.benchmark = benchmark

    def undo() -> None:
        _backends.cudnn.benchmark = searched
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if convolution is not None and convolution is not tf32:
            _backends.cudnn.allow_tf32 = convolution
        for switch, precision in zip(switches, before, strict=True):
            if switch.fp32_precision != precision:
                switch.fp32_precision = "none"  # follows the switch for all, as it may have before
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision

    return undo


def get_or_none(getter: Callable[[], Any]) -> Any:
    """The value of a getter of the older switches; None if it raises, as when newer ones contradict it."""
    try:
        return getter()
    except RuntimeError:
        return None


def matmul_precision() -> str:
    """The value of torch.set_float32_matmul_precision, or of the newer switch where the two differ."""
    return str(get_or_none(torch.get_float32_matmul_precision) or _backends.cuda.matmul.fp32_precision)


def convolves_in_tf32() -> bool:
    return bool(_backends.cudnn.conv.fp32_precision == "tf32")
