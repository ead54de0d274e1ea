"""`replearn train`: one run of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import ReplearnError
from .. import flags


def train(
    recipe: flags.RecipeName,
    method: Annotated[str | None, typer.Option(help="Which row; the first with RepL if not given.")] = None,
    data: flags.Data = None,
    seed: flags.Seed = 0,
    epochs: flags.Epochs = None,
    device: flags.Device = "auto",
    out: flags.Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in the run's folder.")
    ] = False,
    pretrained: flags.Pretrained = None,
    settings: flags.Settings = None,
    data_root: flags.DataRoot = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bit-equal on a GPU too; slower.")
    ] = False,
    logger: flags.Logger = None,
) -> None:
    """Train one run of a recipe.

    Its folder gets the resolved recipe, a log, a checkpoint and the result. Ctrl-C stops cleanly;
    `--resume` goes on as if nothing had happened.

    Examples:

    * `replearn train demo`
    * `replearn train t1_resnet32 --method e2e --data svhn --seed 1`
    * `replearn train t1_resnet32 --epochs 50 --set optimizer.lr=0.4 --out runs/half-rate`
    * `replearn train tab_finetune_vit --pretrained vit_small.safetensors`
    * `torchrun --nproc_per_node 4 -m replearn train t2_resnet34 --method repl-first-2`
    """
    from ...experiments.training.fit import fit  # seconds to import, which help and errors need not wait for
    from ...experiments.training.tasks import task_named
    from ..progress import summary, watching
    from ..runs import data_of, found, leads, resolved, spec_of, variant_named

    chosen = resolved(recipe, epochs, settings or [], pretrained)
    with_repl = (row for row in chosen.variants if row.method == "repl")
    variant = next(with_repl, chosen.variants[0]) if method is None else variant_named(chosen, method)
    spec = spec_of(chosen, variant, data_of(chosen, data), seed, out, data_root)
    before = found(spec)
    begun = before is not None or any(spec.out.glob("checkpoint*"))
    if begun and not resume:
        state = "finished" if before and before.finished else "begun"
        raise ReplearnError(
            f"{spec.out} holds a run that was {state}. Add --resume to go on with it, or --out for another folder."
        )
    task = task_named(chosen.task)
    with watching(1, spec.epochs, task) as progress:
        (result,) = fit(
            [spec], device=device, resume=resume, progress=progress, deterministic=deterministic, logger=logger
        )
    if not leads():
        return
    typer.echo(summary(f"{chosen.name}, {variant.label}, {spec.data}, seed {seed}", result.epochs, task))
    typer.echo(spec.out / "result.json")
