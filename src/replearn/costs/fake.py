"""Copies of a model on fake CUDA tensors: shapes and dtypes as on a GPU, without memory and without a GPU.

On meta tensors attention, BatchNorm and dropout run other code than on CUDA tensors; fake tensors on a CUDA device
are dispatched as real ones would be.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..blocks.global_settings import GlobalSetting, Undo
from ..errors import ReplearnError
from ..operators._base.shell import without_hooks

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        raise ReplearnError(
            f"precision={precision!r}: write one of {', '.join(get_args(Precision))}; 16 bits mean autocast."
        )


def without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device; on the CPU where its constructor computes with real numbers."""
    try:
        with torch.device("meta"):
            return build()
    except (ReplearnError, NotImplementedError, RuntimeError):
        return build()


def converted_copy(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with every tensor converted, without hooks; no weight is copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors_of(module):
            made = convert(tensor).detach()
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo.setdefault(id(tensor), made)
    try:
        return without_hooks(copy.deepcopy(model, memo))
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} can't be copied ({type(error).__name__}: {error}), and costs are worked out "
            "on a copy. Estimate a freshly built model."
        ) from error


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors in plain attributes or in lists and dicts there."""
    for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
        found = value.values() if isinstance(value, Mapping) else value
        for item in found if isinstance(found, (list, tuple)) or isinstance(value, Mapping) else (value,):
            if isinstance(item, Tensor):
                yield item


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def on_fake_gpu(tensor: Tensor) -> Tensor:  # only inside a fake mode
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def example_on_fake_gpu(example: Any) -> Any:
    """The user's batch, of any nesting, with its tensors on the fake GPU."""
    return tree_map_only(Tensor, on_fake_gpu, example)


@contextmanager
def fake_gpu(precision: str) -> Iterator[None]:
    """Inside, tensors are fake, attention runs the kernel that CUDA picks, and autocast has this precision."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    dtype = AUTOCAST.get(precision)
    was, was_dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True), FusedAttention(), _as_with_a_gpu():
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


_gpu = GlobalSetting()


def _as_with_a_gpu() -> AbstractContextManager[None]:
    """Make torch.autocast("cuda"), which activation checkpointing enters again, work without a GPU."""
    return nullcontext() if torch.cuda.is_available() else _gpu.changed(_set)


def _set() -> Undo:
    from torch.cuda.amp import common

    was = common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    quiet = warnings.catch_warnings()
    quiet.__enter__()
    warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True

    def undo() -> None:
        common.amp_definitely_not_available, torch.cuda.is_bf16_supported = was
        quiet.__exit__(None, None, None)

    return undo


HALF = (torch.float16, torch.bfloat16)
LARGEST_FLASH_HEAD = 256


class FusedAttention(TorchFunctionMode):
    """Inside, attention on the fake GPU is dispatched to the kernel that CUDA would pick."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with the kernel that CUDA would pick, by shapes and dtypes alone.

    torch's own choice needs a GPU. Here it is flash attention for 16-bit inputs without a mask, memory-efficient
    attention for the rest, and the plain formula where neither applies.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(dtype) if t.dtype is torch.float32 else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.dtype is torch.float32:
            attn_mask = attn_mask.to(dtype)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    width = query.shape[-1]
    aligned = width % (8 if query.dtype in HALF else 4) == 0 and value.shape[-1] == width
    four = query.dim() == 4 and key.dim() == 4
    if four and query.dtype in HALF and attn_mask is None and width <= LARGEST_FLASH_HEAD:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if four and aligned and query.dtype in (*HALF, torch.float32):
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query, key)
        wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, wants_grad, dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    """Flash attention with heads padded to a multiple of 8, as the kernel needs."""
    width = q.shape[-1]
    if width % 8:
        scale = scale or width**-0.5
        q, k, v = (pad(t, (0, 8 - width % 8)) for t in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0][
        ..., :width
    ]


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the kernel takes it: additive, with rows aligned to 16 elements."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    if mask.shape[-1] % 16:
        mask = pad(mask, (0, 16 - mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
