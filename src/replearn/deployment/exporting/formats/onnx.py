"""An ONNX file, read back by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import ReplearnError
from ....fast.verify import tensors_in
from ..job import Job, Runner
from ..tracing import Inputs, with_plain_outputs

SUFFIX = ".onnx"
TOLERANCE: float | None = 1e-4  # another library's kernels, which sum in another order
OLDEST = 18  # what torch's exporter writes without converting down, which fails for many models
LIMIT = 2_000_000_000  # bytes that one protobuf file can hold


def write(job: Job, path: Path) -> None:
    onnx = libraries()[0]
    newest = int(onnx.defs.onnx_opset_version())
    if job.opset is not None and (
        not isinstance(job.opset, int) or isinstance(job.opset, bool) or not OLDEST <= job.opset <= newest
    ):
        raise ReplearnError(
            f"opset={job.opset!r} can't be written: this installation writes opsets {OLDEST} to {newest}. Leave "
            "it out for torch's own choice."
        )
    large = sum(t.numel() * t.element_size() for t in job.model.state_dict().values()) > LIMIT
    with quiet():
        torch.onnx.export(
            job.program,
            (),
            path,
            dynamo=True,
            opset_version=job.opset,
            external_data=large,
            verbose=False,
            optimize=True,
            output_names=names_of(run_plain(job)),
        )
    made = onnx.load(path, load_external_data=False)
    written = next(entry.version for entry in made.opset_import if not entry.domain)
    if job.dynamic_batch:
        name_batch_(made.graph)
        path.write_bytes(made.SerializeToString())
    if job.opset is not None and written != job.opset:
        raise ReplearnError(
            f"opset={job.opset} can't be written for {type(job.model).__name__}: it needs operators of opset "
            f"{written}. Write opset={written}, or leave it out."
        )


@torch.no_grad()
def run_plain(job: Job) -> Any:
    return with_plain_outputs(job.model, job.inputs)(*job.inputs.args, **job.inputs.kwargs)


def names_of(made: Any) -> list[str]:
    """What outputs are called: as in the model's dict, else by their place."""
    if isinstance(made, Mapping):
        return [str(name) for name, value in made.items() if isinstance(value, Tensor)]
    count = len(tensors_in(made))
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]


def name_batch_(graph: Any) -> None:
    """Call the free size "batch" wherever it stands, where the tracer says s77."""
    firsts = [side for entry in graph.input for side in entry.type.tensor_type.shape.dim[:1] if side.dim_param]
    symbol = firsts[0].dim_param if firsts else "batch"
    for entry in (*graph.input, *graph.output, *graph.value_info):
        for side in entry.type.tensor_type.shape.dim:
            if side.dim_param:
                side.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", "batch", side.dim_param)


def read(job: Job, path: Path) -> Runner:
    """An ONNX Runtime session on the CPU."""
    import numpy as np

    onnx, runtime = libraries()
    onnx.checker.check_model(str(path))
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own classes, which differ by version
        raise ReplearnError(
            f"ONNX Runtime {runtime.__version__} can't load the file: {str(error).splitlines()[0]}. An older "
            "opset may help, as opset=18."
        ) from error
    names = [entry.name for entry in session.get_inputs()]

    def outputs(inputs: Inputs) -> list[Tensor]:
        given: dict[str, Any] = dict(zip(names, (tensor.numpy() for tensor in inputs.tensors), strict=True))
        return [torch.from_numpy(np.asarray(made)) for made in session.run(None, given)]

    return outputs


def libraries() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - what torch.onnx.export builds the file with
    except ImportError as error:
        raise ReplearnError(f"An ONNX export needs {error.name}: pip install 'replearn[export]'.") from error
    return onnx, onnxruntime


@contextlib.contextmanager
def quiet() -> Any:
    """Without the exporter's chatter about its own insides; its errors still come."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
