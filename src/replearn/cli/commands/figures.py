"""`replearn figures`: the paper's figures from finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import flags


def figures(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs, E2E first.")],
    out: Annotated[Path, flags.out("The folder to write into.")] = Path("figures"),
    samples: flags.Samples = 1000,
    layers: Annotated[list[str] | None, flags.several(help="Layers to show, as layer1.4,layer3.4.")] = None,
    data_root: flags.DataRoot = None,
    device: flags.Device = "auto",
) -> None:
    """Draw the features before the classifier (t-SNE) and the feature maps of runs, side by side.

    With the silhouette of the features, a number for how far the classes lie apart.

    Examples:

    * `replearn figures runs/demo/digits/e2e/seed-0 runs/demo/digits/repl/seed-0 -o figures`
    """
    from ...experiments.report.paper_figures import paper_figures
    from ...experiments.training.fit import device_named

    written, found = paper_figures(
        runs, out, images=samples, layers=layers, data_root=data_root, device=device_named(device)
    )
    for each in found:
        typer.echo(f"{each.label}, seed {each.seed}: silhouette {each.silhouette:.3f}")
    typer.echo(", ".join(map(str, written)))
