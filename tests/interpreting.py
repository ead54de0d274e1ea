"""Triton's kernels without a GPU: the tests that need them run again in a process where Triton interprets them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HERE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(
    HERE == "cpu" and not INTERPRETED,
    reason="kernels need a GPU, or Triton's interpreter: see below",
)


def interpret(file: str, chosen: str) -> None:
    """Run the chosen tests of a file so; none of them may fail or be skipped."""
    if HERE == "cuda" or INTERPRETED:
        pytest.skip("the kernels ran for real")
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, file]
    changes = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # loading plugins takes two seconds
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout


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
