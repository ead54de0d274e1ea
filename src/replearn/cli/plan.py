"""`replearn plan`: which blocks of a model would be replaced, and what that costs."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import nn

from ..errors import ReplearnError
from ..operators import available
from ..operators.options import Options, options_from_dict
from ..planning import plan as plan_model
from ..training.architectures import architecture
from .flags import Json
from .overrides import value_of


def plan(
    model: Annotated[
        str, typer.Argument(help="resnet110, vit_small_16, cifar_resnet:20:8, timm:NAME, torchvision:NAME, ...")
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
    as_json: Json = False,
) -> None:
    """Show which blocks of a model would be replaced, by what, and what it saves.

    The model is built without weights, so large ones cost nothing.

    Examples:

    * `replearn plan resnet110`

    * `replearn plan vit_small_16 --first 2`

    * `replearn plan torchvision:resnet50 --first 2 --operator reduced_bottleneck`

    * `replearn plan timm:convnext_tiny --fraction 0.2 --json`
    """
    chosen = None if targets is None else [name.strip() for name in targets.split(",") if name.strip()]
    found = plan_model(
        built(model), interval, first, fraction=fraction, targets=chosen, operator=operator_named(operator)
    )
    typer.echo(found.to_json() if as_json else str(found))


def built(name: str) -> nn.Module:
    """The model on the meta device; on the CPU where its constructor computes with real numbers."""
    small = name.startswith(("cifar_resnet:", "vit:")) or name in SMALL
    size, classes = (32, 10) if small else (224, 1000)
    try:
        with torch.device("meta"):
            return architecture(name, num_classes=classes, size=size)
    except (ReplearnError, NotImplementedError):
        return architecture(name, num_classes=classes, size=size)


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
