"""`replearn export`: a trained model as a file that needs nothing of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import ReplearnError
from .. import flags


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="The folder of a run, or a checkpoint.")
    ],
    out: Annotated[Path, flags.out("The file to write.")],
    to: Annotated[
        str | None, typer.Option("--format", help="safetensors, pt2 or onnx; by the file's name if not given.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For a checkpoint: resnet32, timm:NAME, torchvision:NAME, ..., or FILE.py:FUNCTION."),
    ] = None,
    size: flags.Size = None,
    fixed_batch: Annotated[bool, typer.Option("--fixed-batch", help="Fix the batch size.")] = False,
) -> None:
    """Deploy a trained model and write it as weights, as a torch.export archive or as ONNX.

    The file is loaded back and compared with the model on random input before it appears.

    Examples:

    * `replearn export runs/t1_resnet32/cifar10/repl/seed-0 -o resnet32.onnx`
    * `replearn export run.safetensors --model torchvision:resnet50 -o resnet50.pt2`
    * `replearn export lm.safetensors --model my_models.py:make_gpt2 -o gpt2.onnx`

    FUNCTION returns the fresh, unreplaced model and an example of its input.
    """
    import torch

    from ...deployment.deploy import deploy
    from ...deployment.exporting import export as write
    from ...deployment.exporting import format_of
    from ...experiments.training.trained import filled, read_trained
    from ...fast.inference import streamline
    from ...surgery.plan_metadata import attached_plan
    from ..subjects import built_by, named_model

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
            fresh, side = named_model(model, source, size)
            example = torch.randn(2, 3, side, side)
        trained = filled(fresh, source)
    plain = deploy(trained, example) if attached_plan(trained) is not None else streamline(trained, example)
    typer.echo(str(write(plain, out, example, to=to, dynamic_batch=not fixed_batch)))
