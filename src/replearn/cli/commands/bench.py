"""`replearn bench`: E2E, removal and RepL side by side in one process, in turns."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import ReplearnError
from .. import flags
from ..bench_inference import inference
from ..near import Near

if TYPE_CHECKING:
    import torch

    from ...experiments.bench.cases import Case
    from ...experiments.bench.steps import Backend

app = typer.Typer(cls=Near)

Rounds = Annotated[int, typer.Option(min=1, help="Rounds; every candidate runs once in each.")]
Inner = Annotated[int, typer.Option(min=1, help="Steps of each candidate in a round.")]


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure E2E, removal and RepL side by side, in turns: training steps, if nothing else is said."""
    if context.invoked_subcommand is None:
        steps()


@app.command()
def steps(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models; the paper's six if not given, two small ones on a CPU.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        flags.several(help="Any of tf32, bf16, captured, compiled; the first three if not given."),
    ] = None,
    interval: flags.Interval = 4,
    first: flags.First = None,
    operator: Annotated[
        list[str] | None, flags.several(help="Operators to measure beside the default, as reduced_bottleneck.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        flags.several(
            "--methods", "--method", help="Methods beside them, as checkpointing,skip_attention,stochastic_depth."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images in a batch.")] = None,
    size: flags.Size = None,
    gpu: flags.Gpu = None,
    probe: flags.Probe = False,
    rounds: Rounds = 10,
    inner: Inner = 3,
    builds: Annotated[
        int, typer.Option(min=1, help="Build all candidates anew so often, and time the rounds of each build.")
    ] = 1,
    device: flags.Device = "auto",
    out: flags.Record = None,
    as_json: flags.Json = False,
) -> None:
    """Time training steps: E2E, removal, RepL, RepL with its weights given or frozen.

    Predicted time, memory and FLOPs stand beside what is measured.

    Examples:

    * `replearn bench steps`

    * `replearn bench steps resnet32 --backend bf16,captured -o bench.json`

    * `replearn bench steps resnet32 --backend captured --builds 3`

    * `replearn bench steps resnet152 --operator bottleneck --methods checkpointing,stochastic_depth`

    * `replearn bench steps torchvision:resnet50 --first 2 --operator reduced_bottleneck --batch-size 64`
    """
    from ...experiments.bench.cases import SMALL_SUITE, SUITE, candidates
    from ...experiments.bench.promised import machine_for
    from ...experiments.bench.record import new_record
    from ...experiments.bench.steps import ABOUT
    from ...experiments.bench.tables import LEGEND, training_table
    from ...experiments.bench.training import compare_steps
    from ...experiments.training.fit import device_named
    from ...operators._base.options import options_named

    flags.one_machine(gpu, probe)
    where = device_named(device)
    machine = machine_for(where, gpu, probe)
    cases = [case_of(name, interval, first, batch_size, size, where) for name in models or []]
    cases = cases or list(SUITE if where.type == "cuda" else SMALL_SUITE)
    backends = backend or ["tf32", "bf16", *(["captured"] if where.type == "cuda" else [])]
    for name in backends:
        if name not in ABOUT:
            raise ReplearnError(f"--backend {name}: there are {', '.join(ABOUT)}.")
    extra = tuple(map(options_named, operator or []))
    record = new_record(command(), where, rounds, inner, builds=builds)
    for case in cases:
        for name in backends:
            sides = candidates(case, extra=extra, methods=methods or ())
            chosen: Backend = name  # type: ignore[assignment]
            often = {"rounds": rounds, "inner": inner, "builds": builds}
            found = compare_steps(case, chosen, where, sides=sides, **often, machine=machine, say=say)
            record = replace(record, training=(*record.training, found))
            if out is not None:
                record.write(out)  # after each: an hour's measurements are not lost with the last
            if not as_json:
                typer.echo(training_table(found) + "\n\n")
    typer.echo(record.to_json() if as_json else LEGEND)


@app.command()
def epochs(
    recipe: flags.RecipeName,
    methods: flags.Methods = None,
    data: flags.Data = None,
    together: Annotated[int, typer.Option(min=0, help="Also time this many seeds of the first row at once.")] = 0,
    rounds: Rounds = 5,
    device: flags.Device = "auto",
    settings: flags.Settings = None,
    data_root: flags.DataRoot = None,
    out: flags.Record = None,
    as_json: flags.Json = False,
) -> None:
    """Time whole training epochs of a recipe's rows in turns: data, augmentation, loss and optimizer included.

    Examples:

    * `replearn bench epochs demo`

    * `replearn bench epochs t1_resnet32 --set precision=bfloat16 --set channels_last=true --together 4`
    """
    from ...experiments.bench.epochs import compare_epochs
    from ...experiments.bench.record import new_record
    from ...experiments.bench.tables import epochs_table
    from ...experiments.training.fit import device_named
    from ...planning.serialization import encode
    from ..runs import data_of, resolved, spec_of, variants_named

    where = device_named(device)
    chosen = resolved(recipe, None, settings or [])
    on = data_of(chosen, data)
    specs = [spec_of(chosen, row, on, 0, None, data_root) for row in variants_named(chosen, methods)]
    rows = compare_epochs(specs, where, rounds=rounds, together=together)
    title = f"{chosen.name}: {chosen.model} on {on}, batch {chosen.batch_size}"
    entry = {"title": title, "recipe": encode(chosen), "data": on, "rows": encode(rows)}
    record = new_record(command(), where, rounds, 1, epochs=(entry,))
    if out is not None:
        record.write(out)
    typer.echo(record.to_json() if as_json else epochs_table(title, rows))


def case_of(
    name: str, interval: int, first: int | None, batch_size: int | None, size: int | None, where: torch.device
) -> Case:
    from ...experiments.bench.cases import ADAMW, CASES, SGD, Case
    from ..subjects import is_small

    known = next((case for case in CASES if case.model == name), None)
    if known and where.type == "cuda" and (interval, first, batch_size, size) == (4, None, None, None):
        return known  # as the suite has it, with its placement
    small = is_small(name)
    usual = known.batch_size if known else (128 if small else 64)
    return Case(
        model=name,
        batch_size=batch_size or (usual if where.type == "cuda" else 8),
        size=size or (32 if small else 224),
        num_classes=10 if small else 1000,
        interval=interval,
        first=first,
        optimizer=ADAMW if "vit" in name else SGD,
    )


def say(text: str) -> None:
    typer.echo(text, err=True)


def command() -> str:
    from ...experiments.training.results import command_line

    return command_line(sys.argv[1:])


app.command()(inference)
