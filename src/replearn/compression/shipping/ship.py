"""Write the compressed model as the standard architecture with fewer blocks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...blocks.running import call, unchanged
from ...errors import ReplearnError, class_and_line
from ...fast.verify import compare, exact, run_on_example, tensors_in
from ..batches import device_of, to_device
from ..compress import Compressed
from . import hugging_face, timm, torchvision
from .build import Build, first_match
from .lists import full_name, shortened

WEIGHTS, ARGUMENTS, LOADER = "model.safetensors", "model.json", "load.py"


@dataclass(frozen=True, slots=True)
class Shipped:
    """The files of a standard model, verified by loading; `print` shows how to load them without this package."""

    folder: Path
    files: tuple[str, ...]
    snippet: str

    def __str__(self) -> str:
        return f"{self.folder}: {', '.join(self.files)}; to load:\n\n{self.snippet}"


def standard(small: Compressed, example: Any = None, *, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """The compressed model as an ordinary one of its own class with fewer blocks, in eval mode.

    For Hugging Face models, timm's, and torchvision's ResNets and vision transformers whose removed blocks have no
    replacement. Both are compared on `example`, an input, or else on some of compress's samples. `arguments` are
    constructor arguments that can't be read off the model. Raises ReplearnError that names the first part which
    the standard architecture does not have.
    """
    return _standard(small, example, arguments)[0]


def ship(
    small: Compressed,
    folder: str | os.PathLike[str],
    example: Any = None,
    *,
    arguments: Mapping[str, Any] | None = None,
) -> Shipped:
    """Write the standard model into a folder, read it back and compare; no replearn is needed to load it.

    A Hugging Face model is written by its save_pretrained; others as a state dict in safetensors, with the
    constructor's arguments as JSON and as a short script.
    """
    model, build, given = _standard(small, example, arguments)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ReplearnError(f"Can't write a model to {folder}, which is a file: name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".replearn-ship-") as part:
        write = write_hugging_face if build.library == "transformers" else write_state
        try:
            snippet, again = write(model, build, Path(part), folder)
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise ReplearnError(
                f"{full_name(model)} could not be written and read back ({class_and_line(error)}). "
                "Nothing is written; export small.model as pt2 or ONNX."
            ) from error
        compare_on(model, again, given, "the model that was read back")
        files = sorted(file.name for file in Path(part).iterdir())
        for name in files:
            os.replace(Path(part) / name, folder / name)
    return Shipped(folder, tuple(files), snippet)


def _standard(
    small: Compressed, example: Any, arguments: Mapping[str, Any] | None
) -> tuple[nn.Module, Build, Any]:
    model, given = small.model, dict(arguments or {})
    for library in (hugging_face, timm, torchvision):
        if library.supports(model):
            short = shortened(small)
            made, build = first_match(short, library.builds(short, given))
            example = to_device(small.example if example is None else example, device_of(model))
            compare_on(model, made, example, f"the standard {type(model).__name__}")
            return made, build, example
    raise ReplearnError(
        f"{full_name(model)} is of no library whose constructors are known here (Hugging Face transformers, timm, "
        "torchvision). Export it as pt2 or ONNX."
    )


@torch.no_grad()
def compare_on(model: nn.Module, other: nn.Module, example: Any, what: str) -> None:
    with exact(), unchanged(model), unchanged(other), run_on_example(model):
        expected, found = (tensors_in(call(part, example)) for part in (model, other))
    # a cache among the outputs has an empty entry for every removed block
    floats = [[tensor for tensor in tensors if tensor.is_floating_point()][:1] for tensors in (expected, found)]
    compare(floats[0], floats[1], what)


def write_hugging_face(model: Any, build: Build, part: Path, folder: Path) -> tuple[str, nn.Module]:
    model.save_pretrained(part)
    name, module = type(model).__name__, type(model).__module__.partition(".")[0]
    again = type(model).from_pretrained(part, local_files_only=True, dtype=model.dtype).to(model.device)
    snippet = f'from {module} import {name}\n\nmodel = {name}.from_pretrained("{folder}").eval()\n'
    return snippet, again.eval()


def write_state(model: nn.Module, build: Build, part: Path, folder: Path) -> tuple[str, nn.Module]:
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, part / WEIGHTS)
    plain = {name: path_of(value) if isinstance(value, type) else value for name, value in build.arguments.items()}
    (part / ARGUMENTS).write_text(json.dumps({"call": build.call, "arguments": plain}, indent=1) + "\n", "utf-8")
    snippet = loading(build, str(folder / WEIGHTS))
    (part / LOADER).write_text(snippet, "utf-8")
    again = build.make()
    again.load_state_dict(load_file(part / WEIGHTS))
    return snippet, again.to(next(model.parameters())).eval()


def loading(build: Build, weights: str) -> str:
    """Python that loads the model with its own library."""
    paths = {name: path_of(value) for name, value in build.arguments.items() if isinstance(value, type)}
    modules = sorted({path.rpartition(".")[0] for path in (*paths.values(), build.call)})
    given = ", ".join(f"{name}={paths.get(name, repr(value))}" for name, value in build.arguments.items())
    lines = [*(f"import {module}" for module in modules), "from safetensors.torch import load_file", ""]
    lines += [f"model = {build.call}({given})", f'model.load_state_dict(load_file("{weights}"))', "model.eval()"]
    return "\n".join([*lines, ""])


def path_of(value: type) -> str:
    return f"{value.__module__}.{value.__qualname__}"
