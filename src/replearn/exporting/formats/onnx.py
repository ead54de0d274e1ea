"""An ONNX file, read back by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ReplearnError
from ..job import Job, Runner
from ..tracing import Inputs

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
        )
    written = next(
        entry.version for entry in onnx.load(path, load_external_data=False).opset_import if not entry.domain
    )
    if job.opset is not None and written != job.opset:
        raise ReplearnError(
            f"opset={job.opset} can't be written for {type(job.model).__name__}: it needs operators of opset "
            f"{written}. Write opset={written}, or leave it out."
        )


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
