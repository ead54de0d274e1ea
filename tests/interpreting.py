"""Triton kernels without a GPU: tests marked `runs_kernels` run in the interpreter, by test_interpreter.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HERE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernels(test: Callable[..., Any]) -> Any:
    """Mark a test that launches Triton kernels: it runs on a GPU, or in Triton's interpreter."""
    skipped = HERE == "cpu" and not INTERPRETED
    return pytest.mark.interpreter(pytest.mark.skipif(skipped, reason="runs in test_interpreter.py")(test))


def distance(found: Tensor | None, expected: Tensor) -> float:
    """The norm of the difference, relative to the expected one's."""
    assert found is not None
    assert found.shape == expected.shape
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def small_vit(**changes: Any) -> nn.Module:
    """timm's ViT with four blocks of a width that the kernels take."""
    from timm.models.vision_transformer import VisionTransformer

    settings: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2}
    torch.manual_seed(0)
    return VisionTransformer(**{**settings, "num_classes": 5, **changes}).to(HERE).eval()
