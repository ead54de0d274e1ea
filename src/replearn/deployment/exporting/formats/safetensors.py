"""The weights of the plain model alone, as `safetensors.torch.load_model` reads them; no code, no plan."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ReplearnError
from ....fast.graph_module import FlatGraph
from ....surgery.state_dicts import check_storable, tied
from ....surgery.tensor_file import write_file
from ..job import Job, Runner
from ..tracing import Inputs, run

SUFFIX = ".safetensors"
TOLERANCE: float | None = 0.0


def write(job: Job, path: Path) -> None:
    if job.opset is not None:
        raise ReplearnError("opset is a setting of ONNX files; leave it out for safetensors.")
    if isinstance(job.model, FlatGraph):
        raise ReplearnError(
            "A flat graph has names of its own for its weights, which no other model could load. Export what "
            "deploy gives without flatten; pt2 and onnx take a flat graph."
        )
    tensors = job.model.state_dict()
    check_storable(tensors)
    aliases = tied(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    # safetensors' own convention: a name that was left out, and the name that holds its tensor
    write_file(path, kept, {"format": "pt", **aliases})


def read(job: Job, path: Path) -> Runner:
    """The file in a copy of the model whose own weights are gone."""
    from safetensors.torch import load_model

    copied = copy.deepcopy(job.model)
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            if tensor.untyped_storage().size():
                tensor.zero_()
    for name, buffer in unsaved(job):  # not part of a state dict: made again by the model's own code
        copied.get_buffer(name).copy_(buffer)
    load_model(copied, path)

    def outputs(inputs: Inputs) -> list[Tensor]:
        return run(copied, inputs)

    return outputs


def unsaved(job: Job) -> list[tuple[str, Tensor]]:
    saved = job.model.state_dict().keys()
    return [(name, buffer) for name, buffer in job.model.named_buffers() if name not in saved]
