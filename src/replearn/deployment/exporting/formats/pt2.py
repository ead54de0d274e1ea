"""A torch.export archive: graph and weights in one file, run by `torch.export.load(FILE).module()`."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ReplearnError
from ..job import Job, Runner
from ..tracing import Inputs, run

SUFFIX = ".pt2"
TOLERANCE: float | None = None


def write(job: Job, path: Path) -> None:
    if job.opset is not None:
        raise ReplearnError("opset is a setting of ONNX files; leave it out for pt2.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(job.program, path)


def read(job: Job, path: Path) -> Runner:
    module = torch.export.load(path).module()

    def outputs(inputs: Inputs) -> list[Tensor]:
        return run(module, inputs)

    return outputs
