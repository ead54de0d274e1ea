"""`replearn plan`: which blocks of a model would be replaced, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from ..choosing import place
from ..costs import Promise, estimate, named_machine
from ..costs import probe as probe_machine
from ..errors import ReplearnError
from ..operators import available
from ..operators.options import Options, options_from_dict
from ..planning import plan as plan_model
from ..plans import Plan
from ..training.architectures import architecture, is_language_model, language_model
from ..training.scene_models import is_detector, is_segmenter, on_meta
from .flags import Json
from .overrides import value_of


def plan(
    model: Annotated[
        str, typer.Argument(help="resnet110, vit_small_16, cifar_resnet:20:8, lm:512:12:8:2048, timm:NAME, ...")
    ],
    interval: Annotated[int, typer.Option(help="Every K-th block.")] = 4,
    first: Annotated[
        int | None, typer.Option(help="Position of the first target; the interval if not given.")
    ] = None,
    fraction: Annotated[float | None, typer.Option(help="A share of all blocks, instead of an interval.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Names of blocks, as layer3.1,layer3.3, instead of either.")
    ] = None,
    operator: Annotated[
        str | None, typer.Option(help="An operator, as no_weights or projection:coefficients=shared,start=zero.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Let the budget choose the targets, as memory<=75%, time<=80% or parameters<=60M."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Predict times for this GPU, as H200, A100 or RTX4090.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Predict times for this machine; measures it once, 20 seconds.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images in a step, for the predicted costs.")] = 64,
    precision: Annotated[str, typer.Option(help="float32, tf32, bfloat16 or float16.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd_momentum, sgd, lion, ...")] = "adamw",
    promise: Annotated[Path | None, typer.Option(help="Write the predicted costs to this file, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Show which blocks of a model would be replaced, by what, and what it saves.

    The model is built without weights, so large ones cost nothing. Parameters, FLOPs, memory and (with --gpu or
    --probe) time are predicted from shapes alone. --json prints the plan, without the costs.

    Examples:

    * `replearn plan resnet110`

    * `replearn plan vit_small_16 --first 2 --gpu H200 --precision bfloat16`

    * `replearn plan torchvision:resnet50 --first 2 --operator reduced_bottleneck`

    * `replearn plan resnet34 --budget "memory<=85%" --batch 256`

    * `replearn plan timm:convnext_tiny --fraction 0.2 --json`
    """
    if gpu is not None and probe:
        raise ReplearnError("--gpu names a machine and --probe measures this one: give one of them.")
    machine = named_machine(gpu) if gpu is not None else probe_machine() if probe else None
    network, options = built(model), operator_named(operator)
    example = images_for(network, model, batch)
    terms: dict[str, Any] = {"optimizer": optimizer, "precision": precision, "machine": machine}
    if budget is not None:
        if (interval, first, fraction, targets) != (4, None, None, None):
            raise ReplearnError(
                "--budget chooses the targets; leave out --interval, --first, --fraction, --targets."
            )
        placement = place(network, budget, example, operator=options, **terms)
        show(placement.plan, placement.promise, str(placement), promise, as_json)
        return
    chosen = None if targets is None else [name.strip() for name in targets.split(",") if name.strip()]
    found = plan_model(network, interval, first, fraction=fraction, targets=chosen, operator=options)
    if as_json and promise is None:
        typer.echo(found.to_json())
        return
    try:
        costs = estimate(network, example, found, **terms)
    except ReplearnError as error:
        if machine is not None or promise is not None or terms != {**DEFAULTS, "machine": None}:
            raise
        typer.echo(f"{found}\n\nnote     its costs can't be predicted: {error}")
        return
    show(found, costs, str(costs), promise, as_json)


DEFAULTS = {"optimizer": "adamw", "precision": "float32"}


def show(plan: Plan, costs: Promise, text: str, file: Path | None, as_json: bool) -> None:
    if file is not None:
        file.write_text(costs.to_json(), encoding="utf-8")
    typer.echo(plan.to_json() if as_json else f"{plan}\n\n{text}")


def built(name: str) -> nn.Module:
    """The model on the meta device; on the CPU where its constructor computes with real numbers."""
    if is_segmenter(name):
        return on_meta(name)
    if is_detector(name):
        raise ReplearnError(
            f"The costs of {name} can't be predicted from shapes: a detector decides by what it sees. Plan its "
            f"backbone, which is all that a plan looks at: replearn plan {name.rpartition('_')[2]}."
        )
    if is_language_model(name):
        with torch.device("meta"):
            return language_model(name, num_words=28_783)  # WikiText-2's
    small = name.startswith(("cifar_resnet:", "vit:")) or name in SMALL
    size, classes = (32, 10) if small else (224, 1000)
    try:
        with torch.device("meta"):
            return architecture(name, num_classes=classes, size=size)
    except (ReplearnError, NotImplementedError):
        return architecture(name, num_classes=classes, size=size)


def images_for(model: nn.Module, name: str, batch: int) -> torch.Tensor:
    """A batch of images as the model takes them, without values."""
    small = name.startswith(("cifar_resnet:", "vit:")) or name in SMALL
    shape = (3, 32, 32) if small else (3, 224, 224)
    if name.startswith("timm:"):
        shape = getattr(model, "default_cfg", {}).get("input_size", shape)
    return torch.empty(batch, *shape, device="meta")


SMALL = ("resnet20", "resnet32", "resnet56", "resnet110", "vit_tiny_8", "vit_patch4")  # for images of 32x32


def operator_named(text: str | None) -> Options | None:
    """An operator written as NAME or NAME:option=value,option=value."""
    if text is None:
        return None
    available()  # the registry fills as the operators' files are read
    name, _, rest = text.partition(":")
    options = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ReplearnError(
                f"--operator {text}: write options as NAME:option=value, as projection:start=zero."
            )
        options[key.strip()] = value_of(value)
    return options_from_dict({"name": name, **options})
