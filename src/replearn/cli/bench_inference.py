"""`replearn bench inference`: the paper's inference tables, measured here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..errors import ReplearnError
from . import flags


def inference(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models; resnet34, resnet101 and vit_small_16 if not given.")
    ] = None,
    batch_size: Annotated[
        list[str] | None, flags.several(help="Images in a batch; 1,32,64 if not given, 1,8 on a CPU.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        flags.several(
            help="fp32, amp, channels_last, channels_last+compile, graph, channels_last+graph, amp+graph (these "
            "are the default), channels_last+compile+graph, amp+compile, amp+compile+graph; with "
            "convolutions fused by cuDNN: channels_last+fuse, channels_last+fuse+graph, amp+fuse, amp+fuse+graph."
        ),
    ] = None,
    size: flags.Size = None,
    first: Annotated[int, typer.Option(min=2, help="Position of the first target.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="How often each side is timed.")] = 20,
    compile_all: Annotated[
        bool, typer.Option("--compile-all", help="Compile every model at every batch size; minutes.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="INT8 against float32 on the CPU instead; compiles for minutes.")
    ] = False,
    device: flags.Device = "auto",
    out: flags.Record = None,
) -> None:
    """Time E2E, dynamic RepL and deployed RepL, each backend for all of them, beside the paper's values.

    Medians with synchronisation, in turns. BatchNorms are folded on the E2E side too.

    Examples:

    * `replearn bench inference -o inference.json`

    * `replearn bench inference resnet34 --batch-size 1 --backend fp32,graph,amp+graph`

    * `replearn bench inference cifar_resnet:20:16 --device cpu --size 32 --batch-size 1,4 --backend fp32`
    """
    import torch

    from ..experiments.bench.inference import HEADER, HEADING, MODELS, Setting, line_of, measure
    from ..experiments.bench.inference_int8 import int8_rows
    from ..experiments.bench.inference_sides import DEFAULT
    from ..experiments.training.fit import device_named
    from ..experiments.training.results import hardware_of, versions_of, write_atomically
    from .subjects import is_small

    names = tuple(models or MODELS)
    where = device_named(device)
    usual = ["1", "32", "64"] if where.type == "cuda" else ["1", "8"]
    sizes = tuple(flags.whole_numbers("--batch-size", batch_size or usual, least=1))
    if size is None:
        small = {is_small(name) for name in names}
        if len(small) > 1:
            raise ReplearnError("Some of these models are for images of 32x32, some for larger ones: give --size.")
        size = 32 if True in small else 224
    chosen = tuple(backend or DEFAULT)
    compiled = {"compiled": tuple((name, batch) for name in names for batch in sizes)} if compile_all else {}
    setting = Setting(
        models=names,
        batches=sizes,
        backends=chosen,
        size=size,
        first=first,
        rounds=rounds,
        **compiled,
    )
    if int8:
        quantized = names if models else ("resnet34", "vit_small_16")
        rows = int8_rows(quantized, size, max(sizes), first, rounds)
        for row in rows:
            typer.echo(json.dumps(row))
        about = {
            "format": "replearn-bench-int8-1",
            "command": f"replearn bench inference --int8 {' '.join(quantized)} --batch-size {max(sizes)} "
            f"--size {size} --first {first} --rounds {rounds}",
            "rows": rows,
            "hardware": hardware_of(torch.device("cpu")) | {"threads": torch.get_num_threads()},
            "versions": versions_of(),
        }
        if out is not None:
            write_atomically(out, json.dumps(about, indent=1))
        return
    if where.type == "cuda":
        torch.backends.cudnn.benchmark = True
    typer.echo(HEADING)
    typer.echo(HEADER)

    def keep(found: dict[str, Any]) -> None:
        if out is not None:
            write_atomically(out, json.dumps(found, indent=1))

    measure(setting, where, lambda row: typer.echo(line_of(row)), keep)
    if out is not None:
        typer.echo(out)
