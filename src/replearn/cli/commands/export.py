"""`replearn export`: a trained model as a file that needs nothing of this package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ...errors import ReplearnError
from .. import flags

if TYPE_CHECKING:
    from torch import nn


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="The folder of a run, or a checkpoint.")
    ],
    out: Annotated[Path, flags.out("The file to write.")],
    to: Annotated[
        str | None,
        typer.Option("--format", help="safetensors, pt2 or onnx; by the file's name if not given."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For a checkpoint: the model, as `replearn plan` takes it, or FILE.py:FUNCTION."),
    ] = None,
    num_classes: flags.NumClasses = None,
    size: flags.Size = None,
    fold: Annotated[str, typer.Option(help="Fold BatchNorms of 'all' blocks, or of 'operators'.")] = "all",
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Take each operator's sum x + Wx into its weight; fastest, not for INT8."),
    ] = False,
    fixed_batch: Annotated[bool, typer.Option("--fixed-batch", help="Fix the batch size.")] = False,
) -> None:
    """Deploy a trained model and write it as weights, as a torch.export archive or as ONNX.

    The file is loaded back and compared with the model on random input before it appears.

    Examples:

    * `replearn export runs/t1_resnet32/RepL -o resnet32.onnx`

    * `replearn export run.safetensors --model torchvision:resnet50 -o resnet50.pt2`

    * `replearn export lm.safetensors --model my_models.py:make_gpt2 -o gpt2.onnx`

    FUNCTION returns the fresh, unreplaced model and an example of its input.
    """
    import torch

    from ...deployment.deploy import deploy
    from ...deployment.exporting import export as write
    from ...deployment.exporting import format_of
    from ...deployment.merge import find_merges
    from ...experiments.training.architectures import architecture
    from ...experiments.training.trained import filled, read_trained
    from ...fast.inference import streamline
    from ...surgery.plan_metadata import attached_plan
    from ..subjects import is_small

    format_of(out, to)  # a wrong name is told before anything is loaded
    if not source.exists():
        raise ReplearnError(f"There is no file or folder {source}. Name the folder of a run, or a checkpoint.")
    if source.is_dir():
        run = read_trained(source)
        trained, example = run.model, run.example
    elif model is None:
        raise ReplearnError(
            f"{source} is a checkpoint, which does not say what model it belongs to: add --model, "
            "as --model resnet34."
        )
    else:
        if ".py:" in model:
            fresh, example = built_by("--model", model)
        else:
            side = size or (32 if is_small(model) else 224)
            fresh = architecture(model, num_classes=num_classes or (10 if is_small(model) else 1000), size=side)
            example = torch.randn(2, 3, side, side)
        trained = filled(fresh, source)
    replaced = attached_plan(trained) is not None
    if merge and not replaced:
        raise ReplearnError(f"--merge: {source} holds a model without operators, so there is no sum to merge.")
    if fold != "all" and not replaced:
        raise ReplearnError(
            f"--fold {fold}: {source} holds a model without operators, whose BatchNorms are all folded."
        )
    plain = (
        deploy(trained, example, fold=cast(Any, fold), merge=merge) if replaced else streamline(trained, example)
    )
    for found in find_merges(trained) if merge else ():
        typer.echo(f"merge: {found}")
    typer.echo(str(write(plain, out, example, to=to, dynamic_batch=not fixed_batch)))


def built_by(flag: str, place: str) -> tuple[nn.Module, Any]:
    """The model and the example that a function in a file of the user's own returns: FILE.py:FUNCTION."""
    from torch import nn

    made = function_of(flag, place)()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ReplearnError(
            f"{flag} {place}: the function has to return the fresh model and an example of its input, as "
            "`return model, torch.randn(2, 3, 224, 224)`."
        )
    return made


def function_of(flag: str, place: str) -> Callable[[], Any]:
    """The function of FILE.py:FUNCTION; its own errors are its own."""
    file, _, name = place.rpartition(":")
    if not Path(file).is_file():
        raise ReplearnError(f"{flag} {place}: there is no file {file}.")
    found = run_path(file).get(name)
    if not callable(found):
        raise ReplearnError(f"{flag} {place}: there is no function {name!r} in {file}.")
    return cast("Callable[[], Any]", found)
