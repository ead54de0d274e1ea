"""What torch's kernels go by beside their tensors and autocast: switches that anybody may set between calls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

_backends: Any = torch.backends


def settings() -> Hashable:
    """All of them as they are now; two calls under equal ones launch the same kernels."""
    cudnn, matmul = _backends.cudnn, _backends.cuda.matmul
    return (
        torch.get_default_dtype(),
        *(matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        # by these, and not by name: what they say in newer versions of torch has two parts, with a name each
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        *(matmul.allow_fp16_accumulation, _backends.cuda.preferred_blas_library()),
        *(_backends.cuda.preferred_linalg_library(), _backends.opt_einsum.enabled, _backends.opt_einsum.strategy),
        *(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic),
        torch.get_deterministic_debug_mode(),
        *attention(),
    )


def attention() -> tuple[Hashable, ...]:
    """Which kernels there are for it, and which of them comes first."""
    cuda = _backends.cuda
    return (
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()),
        *(_backends.mha.get_fastpath_enabled(), *torch._C._get_sdp_priority_order()),
    )
