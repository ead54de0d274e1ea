"""Inference latency as in the paper's tables: every side on one backend, in turns, beside its values."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from ...costs.precision import convolves_in_tf32, matmul_precision
from ...errors import ReplearnError
from ...fast.graphs.replay import Replayed
from ..training.paper import paper_tables
from ..training.step import many_graphs
from .inference_sides import BACKENDS, DEFAULT, DEPLOYED, DYNAMIC, E2E, Sides, has, make_sides, runner
from .record import new_record
from .timing import interleave, ratio

FORMAT = "replearn-bench-inference-1"
MODELS = ("resnet34", "resnet101", "vit_small_16")
# the paper's two tables: of an A100-80GB, synthetic images of 224x224, synchronised medians
PAPER_DYNAMIC, PAPER_E2E = "tab:dynamic_vs_deploy", "tab:bp_vs_repl_deploy"
PAPER_MODELS = {"ResNet34": "resnet34", "ResNet-34": "resnet34", "ResNet101": "resnet101"}
PAPER_MODELS |= {"ViT-S": "vit_small_16", "ViT-S/16": "vit_small_16"}
PAPER_BACKENDS = {"RepL": "fp32", "RepL + AMP": "amp", "FP32": "fp32", "AMP": "amp"}
PAPER_BACKENDS |= {"channels-last": "channels_last", "channels-last + compile": "channels_last+compile"}
# the second table does not print its batch sizes; its deployed column is the first table's at these
PAPER_BATCHES = {"resnet34": 64, "vit_small_16": 64, "resnet101": 32}
LEAD = 1  # runs before each that is timed: a model that is served has run just before
HEADING = (
    "E2E and RepL deployed: flat graphs, BatchNorms folded, under amp weights cast once; RepL deployed: its "
    "operators' sums merged into weights. dynamic: as trained. "
    "graph: replayed as a CUDA graph, all sides, with the copies of inputs and outputs. fuse: convolutions fused "
    "with sums and ReLUs by cuDNN. Times are medians in milliseconds a batch."
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What to measure."""

    models: tuple[str, ...] = MODELS
    batches: tuple[int, ...] = (1, 32, 64)
    backends: tuple[str, ...] = DEFAULT
    size: int = 224
    interval: int = 4
    first: int | None = 2
    operator: str | None = None  # the paper's for the kind of block, if not given
    rounds: int = 20


def measure(setting: Setting, device: torch.device, command: str = "") -> Iterator[dict[str, Any]]:
    """Every backend that this device has; after each row all there is so far.

    It says "finished": false until the last row: a run that is stopped loses nothing.
    """
    if unknown := [backend for backend in setting.backends if backend not in BACKENDS]:
        raise ReplearnError(f"There is no backend {unknown[0]!r}; there are {', '.join(BACKENDS)}.")
    on_gpu = device.type == "cuda"
    backends = [each for each in setting.backends if on_gpu or not (has(each, "graph") or has(each, "fuse"))]
    if not backends:
        raise ReplearnError(
            f"None of {', '.join(setting.backends)} is measured here: graph and fuse need a CUDA GPU, and this is "
            f"{device.type}."
        )
    numbers = {
        "conv": "tf32" if convolves_in_tf32() and on_gpu else "float32",
        "matmul": matmul_precision(),
        "amp": "float16" if on_gpu else "bfloat16",
    }
    about = {"format": FORMAT, "setting": asdict(setting), "lead": LEAD, "numbers": numbers}
    found = new_record(command, device, **about, rows=[])
    found["hardware"]["threads"] = torch.get_num_threads()
    cells = len(setting.models) * len(backends) * len(setting.batches)
    begin = time.perf_counter()
    for model in setting.models:
        more = {"interval": setting.interval, "operator": setting.operator}
        sides = make_sides(model, setting.size, device, setting.first, **more)
        for backend, batch in product(backends, setting.batches):
            with many_graphs() if has(backend, "compile") else nullcontext():
                found["rows"].append(row_of(sides, model, batch, backend, setting, device))
            found["seconds"] = round(time.perf_counter() - begin, 1)
            found["finished"] = len(found["rows"]) == cells
            yield found


def row_of(
    sides: Sides, model: str, batch: int, backend: str, setting: Setting, device: torch.device
) -> dict[str, Any]:
    """One cell: all sides in turns, their ratios, and the paper's values for the same setting."""
    two = has(backend, "compile") or has(backend, "fuse")
    kinds = (E2E, DEPLOYED) if two else (E2E, DYNAMIC, DEPLOYED)
    images = torch.randn(batch, 3, setting.size, setting.size, device=device)
    if has(backend, "channels_last"):
        images = images.contiguous(memory_format=torch.channels_last)
    built = sides.built(backend, kinds, images)
    bodies = {kind: runner(made, images) for kind, made in built.items()}
    rounds = setting.rounds if batch > 1 else 2 * setting.rounds
    found = interleave(bodies, device, rounds=rounds, warmup=3, lead=LEAD)
    return {
        "model": model,
        "batch": batch,
        "backend": backend,
        "targets": f"{sides.num_targets} of {sides.num_blocks}",
        "flat": sides.traceable(images),
        "replayed": all(isinstance(side, Replayed) and side.num_graphs > 0 for side in built.values()),
        "milliseconds": {kind: asdict(timing.spread) for kind, timing in found.items()},
        "speedup": {
            f"{DEPLOYED} against {kind}": asdict(ratio(found[kind], found[DEPLOYED])) for kind in kinds[:-1]
        },
        "paper": printed(model, batch, backend),
    }


def printed(model: str, batch: int, backend: str) -> dict[str, dict[str, float]]:
    """The paper's milliseconds of one setting by table; `base` is dynamic RepL, or BP.

    >>> printed("resnet34", 64, "fp32")["tab:bp_vs_repl_deploy"]["speedup"]
    1.264
    """
    found = {}
    for table, base in ((PAPER_DYNAMIC, "dynamic"), (PAPER_E2E, "bp")):
        for row in paper_tables()[table]["rows"]:
            name = PAPER_MODELS[row["backbone"]]
            setting = (name, row.get("batch", PAPER_BATCHES[name]), PAPER_BACKENDS[row["method"]])
            if setting == (model, batch, backend):
                found[table] = {"base": row[base], "deployed": row["deploy"], "speedup": row["speedup"]}
    return found


def header(names: Sequence[str]) -> str:
    """The names of the columns, the first wide enough for all models."""
    columns = f"{'batch':>5} {'backend':27} {'E2E':>8}  {'dynamic':>8}  {'deployed':>8}"
    return f"{'model':{max(map(len, names))}} {columns}   deployed is faster than ... by"


def line_of(row: dict[str, Any], names: Sequence[str]) -> str:
    """One cell in a line: milliseconds, and the ratios with the paper's in brackets."""
    times, told = row["milliseconds"], []
    kinds = (E2E, DYNAMIC, DEPLOYED)
    shown = "  ".join(f"{times[kind]['median']:8.3f}" if kind in times else " " * 8 for kind in kinds)
    for label, slow, table in (("dynamic", DYNAMIC, PAPER_DYNAMIC), ("E2E", E2E, PAPER_E2E)):
        if gain := row["speedup"].get(f"{DEPLOYED} against {slow}"):
            theirs = row["paper"].get(table)
            printed = f" [paper {theirs['speedup']:.3f}]" if theirs else ""
            told.append(f"{label} {gain['median']:.3f}{printed}")
    model = row["model"].ljust(max(map(len, names)))
    return f"{model} {row['batch']:5} {row['backend']:27} {shown}   {', '.join(told)}"
