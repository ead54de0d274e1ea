"""What a format works on: the plain model on the CPU, its program, and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.export import ExportedProgram

from .tracing import Inputs, program_of, with_plain_outputs

Runner = Callable[[Inputs], list[Tensor]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One export, the same for every format."""

    model: nn.Module
    inputs: Inputs
    dynamic_batch: bool
    opset: int | None

    @cached_property
    def program(self) -> ExportedProgram:
        return program_of(
            with_plain_outputs(self.model, self.inputs), self.inputs, dynamic_batch=self.dynamic_batch
        )
