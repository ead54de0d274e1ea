"""The settings under which a flat graph will run, which passes depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..graph_module import FlatGraph
from ..kernels._dispatch import triton_runs_on
from ..kernels.conv_bias_add_relu import has_cudnn


@dataclass(frozen=True, kw_only=True)
class Context:
    """The arguments of `deploy` or `streamline` that passes depend on."""

    dtype: torch.dtype | None = None  # of the autocast that the graph runs under
    compile: bool = False
    graph: bool = False  # replayed as a CUDA graph
    fuse: bool = False
    example: Any = None  # the model's input

    @property
    def launches_are_free(self) -> bool:
        return self.graph or self.compile


def has_triton(flat: FlatGraph) -> bool:
    return all(triton_runs_on(parameter.device) for parameter in flat.parameters())


def on_cudnn(flat: FlatGraph) -> bool:
    return all(has_cudnn(parameter.device) for parameter in flat.parameters())
