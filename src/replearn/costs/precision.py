"""How exactly float32 numbers are multiplied: in full, or in TF32, which rounds them to ten bits.

torch has two generations of switches for it, and the getters of the older one raise where a user has set the newer
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
    """Products in TF32 or in full, and with or without cuDNN's search for kernels; as it was afterwards.

    What is as asked for already is not touched: cuDNN's switches follow `torch.backends.fp32_precision` until they
    are set for the first time, and torch has no way back to that.
    """
    return _products.changed(lambda: _set(tf32, benchmark))


def _set(tf32: bool, benchmark: bool | None) -> Undo:
    switches = [_backends.cuda.matmul, _backends.mkldnn.matmul, _backends.cudnn.conv, _backends.cudnn.rnn]
    switches += [] if tf32 else [_backends.mkldnn.conv]  # convolutions on a CPU are only ever asked to be exact
    before = [switch.fp32_precision for switch in switches]
    matmul, convolution = said(torch.get_float32_matmul_precision), said(lambda: _backends.cudnn.allow_tf32)
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
                switch.fp32_precision = "none"  # as the switch for all has it, where it was so before
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision

    return undo


def said(getter: Callable[[], Any]) -> Any:
    """What a getter of the older switches says; None where newer ones contradict it."""
    try:
        return getter()
    except RuntimeError:
        return None


def matmul_precision() -> str:
    """As torch.set_float32_matmul_precision takes it, or as the newer switch has it where the two differ."""
    return str(said(torch.get_float32_matmul_precision) or _backends.cuda.matmul.fp32_precision)


def convolves_in_tf32() -> bool:
    return bool(_backends.cudnn.conv.fp32_precision == "tf32")
