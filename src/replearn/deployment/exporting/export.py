"""Export: write a file in one of the formats, read it back, compare, and then move it to its path."""

import contextlib
import copy
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ReplearnError, first_line, library
from ...fast.graph_module import FlatGraph
from ...fast.verify import compare, tensors_in
from ...planning.validate import own_copy, unwrapped
from ...surgery.state_dicts import check_storable, tied
from ...surgery.tensor_file import refuse_special, write_file
from ..saving import check_plain
from .tracing import Inputs, Job, batched, inputs_of, random_like, resized, run

Runner = Callable[[Inputs], list[Tensor]]
LIMIT = 2_000_000_000  # bytes that one protobuf file can hold


@dataclass(frozen=True)
class Format:
    """How a format is written and read back, and the allowed difference (None: rounding)."""

    suffix: str
    tolerance: float | None
    write: Callable[[Job, Path], None]
    read: Callable[[Job, Path], Runner]
    load: str = ""  # how it is read without this package, where the file alone is enough


def write_safetensors(job: Job, path: Path) -> None:
    """Write the weights of the plain model, for `safetensors.torch.load_model`; without code and plan."""
    if isinstance(job.model, FlatGraph):
        raise ReplearnError(
            "A flat graph has names of its own for its weights, which no other model could load. Export what "
            "deploy gives without flatten; pt2 and onnx take a flat graph."
        )
    tensors = job.model.state_dict()
    check_storable(tensors)
    aliases = tied(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    # safetensors' own convention for tied tensors: an alias, and the name of its tensor
    write_file(path, kept, {"format": "pt", **aliases})


def read_safetensors(job: Job, path: Path) -> Runner:
    """Load the file into a copy of the model with zeroed weights."""
    from safetensors.torch import load_model

    copied = copy.deepcopy(job.model)
    saved = job.model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in (*copied.named_parameters(), *copied.named_buffers()):
            # buffers that are not saved keep their values
            if name in saved and tensor.untyped_storage().size():
                tensor.zero_()
    load_model(copied, path)
    return lambda inputs: run(copied, inputs)


def write_pt2(job: Job, path: Path) -> None:
    """A torch.export archive: graph and weights in one file, run by `torch.export.load(FILE).module()`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(job.program, path)


def read_pt2(job: Job, path: Path) -> Runner:
    module = torch.export.load(path).module()
    return lambda inputs: run(module, inputs)


def write_onnx(job: Job, path: Path) -> None:
    onnx_libraries()
    large = sum(tensor.nbytes for tensor in job.model.state_dict().values()) > LIMIT
    free = {id(tensor) for tensor in batched(job.inputs)} if job.dynamic_batch else set()
    options: dict[str, Any] = {"external_data": large, "output_names": names_of(job.reference[1])}
    if free:  # called "batch" wherever it stands, where the tracer says s77
        options["dynamic_shapes"] = tuple({0: "batch"} if id(t) in free else {} for t in tensors_in(job.inputs))
    with quiet():
        torch.onnx.export(job.program, (), path, dynamo=True, verbose=False, **options)


def names_of(made: Any) -> list[str]:
    """Names of the outputs: the keys of the model's dict, else numbered."""
    if isinstance(made, Mapping):
        return [str(name) for name, value in made.items() if isinstance(value, Tensor)]
    count = len(tensors_in(made))
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]


def read_onnx(job: Job, path: Path) -> Runner:
    """An ONNX Runtime session on the CPU."""
    onnx, runtime = onnx_libraries()
    onnx.checker.check_model(str(path))
    try:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own classes, which differ by version
        raise ReplearnError(
            f"ONNX Runtime {runtime.__version__} can't load the file: {first_line(error)}."
        ) from error
    names = [entry.name for entry in session.get_inputs()]

    def outputs(inputs: Inputs) -> list[Tensor]:
        given: dict[str, Any] = dict(zip(names, (tensor.numpy() for tensor in tensors_in(inputs)), strict=True))
        return [torch.as_tensor(made) for made in session.run(None, given)]

    return outputs


def onnx_libraries() -> tuple[Any, Any]:
    library("onnxscript", "export")  # what torch.onnx.export builds the file with
    return library("onnx", "export"), library("onnxruntime", "export")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's logs, warnings and prints."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


FORMATS = {
    # another library's kernels, which sum in another order
    "onnx": Format(".onnx", 1e-4, write_onnx, read_onnx, "onnxruntime.InferenceSession({!r})"),
    "pt2": Format(".pt2", None, write_pt2, read_pt2, "torch.export.load({!r}).module()"),
    "safetensors": Format(".safetensors", 0.0, write_safetensors, read_safetensors),
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was read back and gave the model's outputs."""

    path: Path
    format: str
    bytes: int
    batch_sizes: tuple[int, ...]  # that were compared
    difference: float  # the largest, as a share of an output's largest value
    tolerance: float | None  # what was allowed; None: rounding in the outputs' dtype

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.batch_sizes))
        load = FORMATS[self.format].load.format(str(self.path))
        allowed = "rounding" if self.tolerance is None else f"{self.tolerance:.0e}"
        return (
            f"{self.path}: {self.format}, {self.bytes / 1e6:.1f} MB; read back and compared with the model on "
            f"random input, batch {sizes}: largest difference {self.difference:.1e} (allowed: {allowed})"
        ) + (load and f"\nload it without replearn: {load}")


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    *,
    to: str | None = None,
    dynamic_batch: bool = True,
) -> Exported:
    """Write a deployed model to a file that is used without this package: safetensors, pt2 or onnx.

    The format is `to`, or that of the file's suffix. `example` is an input (a tensor, a tuple of arguments or a
    dict of keywords); the batch size stays free. The file is read back and run on random inputs of two batch sizes
    before it is moved to `path`; for a difference beyond rounding ReplearnError is raised and nothing is written.

    >>> import replearn, tempfile, torch
    >>> from replearn.deployment.exporting import export
    >>> model = replearn.models.CifarResNet(8, width=4).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(model, f"{folder}/model.safetensors", torch.randn(2, 3, 8, 8)).difference
    0.0
    """
    name = format_of(path, to)
    form = FORMATS[name]
    model = unwrapped(model)
    check_plain(model, "Export")
    file = Path(os.path.realpath(path))
    if not file.parent.is_dir():
        raise ReplearnError(f"Can't export to {path}: the folder {file.parent} does not exist; create it first.")
    if file.is_dir():
        raise ReplearnError(
            f"Can't export to {path}, which is a folder: name a file in it, as model{form.suffix}."
        )
    refuse_special(file)
    inputs = inputs_of(example)
    plain = own_copy(model).cpu()
    job = Job(model=plain, inputs=inputs, dynamic_batch=dynamic_batch)
    sizes = (1, 3) if dynamic_batch else (len(batched(inputs)[0]),)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".replearn-export-") as folder:
        written = Path(folder) / file.name
        form.write(job, written)
        again, reference = form.read(job, written), job.reference[0]
        worst = 0.0
        for seed, size in enumerate(sizes):
            given = random_like(resized(inputs, size), seed)
            worst = max(worst, compare(run(reference, given), again(given), f"the {name} file", form.tolerance))
        size = sum(part.stat().st_size for part in Path(folder).iterdir())
        for part in sorted(Path(folder).iterdir()):
            os.replace(part, file.parent / part.name)
    return Exported(
        path=Path(path), format=name, bytes=size, batch_sizes=sizes, difference=worst, tolerance=form.tolerance
    )


def format_of(path: str | os.PathLike[str], to: str | None) -> str:
    """The format's name: `to`, or the one of the file's suffix."""
    if to is not None and to not in FORMATS:
        raise ReplearnError(f"There is no format {to!r}; there are {', '.join(FORMATS)}.")
    by_suffix = (name for name, form in FORMATS.items() if os.fspath(path).endswith(form.suffix))
    found = to or next(by_suffix, None)
    if found is None:
        suffixes = ", ".join(form.suffix for form in FORMATS.values())
        raise ReplearnError(
            f"The format of {path} is not clear: end its name with one of {suffixes}, or write to='pt2'."
        )
    return found
