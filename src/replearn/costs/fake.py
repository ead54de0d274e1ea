"""A model's double on fake CUDA tensors: shapes and dtypes as on a GPU, no weights, no GPU.

Meta tensors take other paths than CUDA ones (attention, BatchNorm, dropout); fake tensors that say they are on
a GPU are dispatched as real ones would be.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import ReplearnError
from ..operators._base.shell import without_hooks

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        raise ReplearnError(
            f"precision={precision!r}: write one of {', '.join(get_args(Precision))}; 16 bits mean autocast."
        )


def double_of(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module's structure with every tensor converted; no weight is copied, no hook kept."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors_of(module):
            memo.setdefault(id(tensor), _as_kind(tensor, convert(tensor)))
    try:
        return without_hooks(copy.deepcopy(model, memo))
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} can't be copied ({type(error).__name__}: {error}), and costs are worked out "
            "on a copy. Estimate a freshly built model."
        ) from error


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that lie in plain attributes or in lists and dicts there."""
    for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
        found = value.values() if isinstance(value, Mapping) else value
        for item in found if isinstance(found, (list, tuple)) or isinstance(value, Mapping) else (value,):
            if isinstance(item, Tensor):
                yield item


def _as_kind(original: Tensor, made: Tensor) -> Tensor:
    """A parameter stays one, trainable or frozen as before."""
    made = made.detach()
    if isinstance(original, nn.Parameter):
        return nn.Parameter(made, requires_grad=original.requires_grad)
    return made


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def on_fake_gpu(tensor: Tensor) -> Tensor:
    """Only inside a fake mode."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def example_on_fake_gpu(example: Any) -> Any:
    """The user's batch, whatever its nesting, with its tensors on the fake GPU."""
    return tree_map_only(Tensor, on_fake_gpu, example)


@contextmanager
def fake_gpu(precision: str) -> Iterator[None]:
    """Fake tensors, attention as CUDA picks it, and autocast as asked, on a machine with or without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second, and a plan alone needs none of it

    from .attention import FusedAttention

    dtype = AUTOCAST.get(precision)
    was, was_dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), FusedAttention(), _as_with_a_gpu():
        warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
        torch.set_autocast_enabled("cuda", dtype is not None)
        torch.set_autocast_dtype("cuda", dtype or torch.bfloat16)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled("cuda", was)
            torch.set_autocast_dtype("cuda", was_dtype)


@contextmanager
def _as_with_a_gpu() -> Iterator[None]:
    """What torch leaves out without a GPU, as it is with one.

    torch.autocast("cuda") does nothing there, and recomputing enters it anew; and a convolution forgets that its
    input was channels_last.
    """
    from torch.cuda.amp import common

    if torch.cuda.is_available():
        yield
        return
    was = common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    layout = torch._C._conv_determine_backend_memory_format
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    torch._C._conv_determine_backend_memory_format = kept_layout
    try:
        yield
    finally:
        common.amp_definitely_not_available, torch.cuda.is_bf16_supported = was
        torch._C._conv_determine_backend_memory_format = layout


def kept_layout(input: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """cuDNN's rule: channels_last if the input or the kernel is."""
    last = any(
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
        for tensor in (input, weight)
    )
    return torch.channels_last if last else torch.contiguous_format
