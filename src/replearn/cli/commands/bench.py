"""`replearn bench`: E2E, removal and RepL side by side in one process, in turns."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import ReplearnError
from .. import flags

if TYPE_CHECKING:
    import torch

    from ...experiments.bench.cases import Case

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


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
    operators: Annotated[
        list[str] | None, flags.several(help="Operators to measure beside the default, as reduced_bottleneck.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        flags.several(
            "--methods", "--method", help="Methods beside them, as checkpointing,skip_attention,stochastic_depth."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images in a batch; few on a CPU.")] = None,
    size: flags.Size = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; 10, on a CPU for large images 5.")] = None,
    inner: Annotated[
        int | None, typer.Option(min=1, help="Steps of each candidate in a round; 3, on a CPU for large images 1.")
    ] = None,
    builds: Annotated[
        int, typer.Option(min=1, help="Build all candidates anew so often, and time the rounds of each build.")
    ] = 1,
    device: flags.Device = "auto",
    out: flags.Record = None,
    as_json: flags.Json = False,
) -> None:
    """Time training steps: E2E, removal, RepL, and further operators and methods.

    Examples:

    * `replearn bench steps`
    * `replearn bench steps resnet32 --backend bf16,captured -o bench.json`
    * `replearn bench steps resnet32 --backend captured --builds 3`
    * `replearn bench steps resnet152 --operators bottleneck --methods checkpointing,stochastic_depth`
    * `replearn bench steps torchvision:resnet50 --first 2 --operators reduced_bottleneck --batch-size 64`
    """
    from ...experiments.bench.cases import SMALL_SUITE, SUITE, candidates
    from ...experiments.bench.record import LEGEND, new_record, record_json, training_table
    from ...experiments.bench.steps import compare_steps
    from ...experiments.training.fit import device_named
    from ...experiments.training.results import command_line
    from ...operators._base.options import options_named

    where = device_named(device)
    cases = [case_of(name, interval, first, batch_size, size, where) for name in models or []]
    cases = cases or list(SUITE if where.type == "cuda" else SMALL_SUITE)
    backends = backend or ["tf32", "bf16", *(["captured"] if where.type == "cuda" else [])]
    extra = tuple(map(options_named, operators or []))
    slow = where.type != "cuda" and any(case.size > 64 for case in cases)
    usual = (5, 1) if slow else (10, 3)
    often = {"rounds": rounds or usual[0], "inner": inner or usual[1], "builds": builds}
    record = new_record(command_line(sys.argv[1:]), where, **often, training=[])
    for case in cases:
        for name in backends:
            sides = candidates(case, extra=extra, methods=methods or ())
            chosen: Any = name  # checked there
            found = compare_steps(case, chosen, where, sides=sides, **often, say=partial(typer.echo, err=True))
            record["training"].append(found)
            record_json(record, out)  # after each: an hour's measurements are not lost with the last
            if not as_json:
                typer.echo(training_table(found) + "\n\n")
    typer.echo(record_json(record, None) if as_json else LEGEND)


@app.command()
def inference(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models; the paper's three if not given, two small ones on a CPU.")
    ] = None,
    batch_size: Annotated[
        list[str] | None, flags.several(help="Images in a batch; 1,32,64 if not given, 1,8 on a CPU.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        flags.several(
            help="fp32, amp, channels_last, graph, channels_last+graph and amp+graph if not given; also amp or "
            "channels_last with +compile (minutes each) or +fuse (convolutions fused by cuDNN), and +graph."
        ),
    ] = None,
    size: flags.Size = None,
    interval: flags.Interval = 4,
    first: flags.First = 2,
    operator: flags.Operator = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="How often each side is timed; 20, on a CPU for large images 5.")
    ] = None,
    device: flags.Device = "auto",
    out: flags.Record = None,
    as_json: flags.Json = False,
) -> None:
    """Time E2E, dynamic RepL and deployed RepL, each backend for all of them, beside the paper's values.

    Medians with synchronisation, in turns. BatchNorms are folded on the E2E side too.

    Examples:

    * `replearn bench inference -o inference.json`
    * `replearn bench inference resnet34 --batch-size 1 --backend fp32,graph,amp+graph`
    * `replearn bench inference cifar_resnet:20:16 --device cpu --size 32 --batch-size 1,4 --backend fp32`
    """
    import torch

    from ...experiments.bench.cases import SMALL_SUITE
    from ...experiments.bench.inference import HEADING, MODELS, Setting, header, line_of, measure
    from ...experiments.bench.inference_sides import DEFAULT
    from ...experiments.bench.record import record_json
    from ...experiments.training.fit import device_named
    from ...experiments.training.results import command_line
    from ..subjects import is_small

    where = device_named(device)
    on_gpu = where.type == "cuda"
    names = tuple(models or (MODELS if on_gpu else [case.model for case in SMALL_SUITE]))
    usual = ["1", "32", "64"] if on_gpu else ["1", "8"]
    sizes = tuple(flags.whole_numbers("--batch-size", batch_size or usual, least=1))
    if size is None:
        small = {is_small(name) for name in names}
        if len(small) > 1:
            raise ReplearnError("Some of these models are for images of 32x32, some for larger ones: give --size.")
        size = 32 if True in small else 224
    backends, rounds = tuple(backend or DEFAULT), rounds or (20 if on_gpu or size <= 64 else 5)
    places: dict[str, Any] = {"interval": interval, "first": first, "operator": operator}
    setting = Setting(models=names, batches=sizes, backends=backends, size=size, rounds=rounds, **places)
    if on_gpu:
        torch.backends.cudnn.benchmark = True
    say, text = partial(typer.echo, err=as_json), ""
    say(f"{HEADING}\n{header(names)}")
    for found in measure(setting, where, command_line(sys.argv[1:])):
        say(line_of(found["rows"][-1], names))
        text = record_json(found, out)
    if as_json or out is not None:
        typer.echo(text if as_json else out)


def case_of(
    name: str, interval: int, first: int | None, batch_size: int | None, size: int | None, where: torch.device
) -> Case:
    from ...experiments.bench.cases import ADAMW, CASES, SGD, Case
    from ..subjects import is_small, refuse_others

    refuse_others(name)
    known = next((case for case in CASES if case.model == name), None)
    if known and where.type == "cuda" and (interval, first, batch_size, size) == (4, None, None, None):
        return known  # as the suite has it, with its placement
    small = is_small(name)
    usual = known.batch_size if known else (128 if small else 64)
    return Case(
        model=name,
        batch_size=batch_size or (usual if where.type == "cuda" else 8 if small else 4),
        size=size or (32 if small else 224),
        num_classes=10 if small else 1000,
        interval=interval,
        first=first,
        optimizer=ADAMW if "vit" in name else SGD,
    )
