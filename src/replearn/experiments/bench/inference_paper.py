"""What the paper prints about inference: an A100-80GB, synthetic images of 224x224, synchronised medians.

The numbers are those of the package's one data file, `paper_tables.json`; here are the names that they go by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..training.paper import paper_tables

DYNAMIC, BASELINE, INT8 = "tab:dynamic_vs_deploy", "tab:bp_vs_repl_deploy", "tab:repl_quant_imagenet"
MODELS = {"ResNet34": "resnet34", "ResNet-34": "resnet34", "ResNet101": "resnet101"}
MODELS |= {"ViT-S": "vit_small_16", "ViT-S/16": "vit_small_16"}
BACKENDS = {"RepL": "fp32", "RepL + AMP": "amp", "FP32": "fp32", "AMP": "amp", "channels-last": "channels_last"}
BACKENDS |= {"channels-last + compile": "channels_last+compile"}
# the second table does not print its batch sizes; its deployed column is the first table's at these
BATCHES = {"resnet34": 64, "vit_small_16": 64, "resnet101": 32}


@dataclass(frozen=True)
class PaperLatency:
    """One row of a latency table: milliseconds a batch of the slower and the faster side."""

    table: str
    model: str
    batch: int
    backend: str
    base: float  # dynamic RepL in tab:dynamic_vs_deploy, BP in tab:bp_vs_repl_deploy
    deployed: float
    speedup: float


@dataclass(frozen=True)
class PaperInt8:
    """One row of tab:repl_quant_imagenet; its float32 column is a GPU's and its INT8 column a CPU's."""

    model: str
    method: str
    float32_top1: float
    float32_top5: float
    int8_top1: float
    int8_top5: float
    float32_images_per_second: float
    int8_images_per_second: float


@cache
def latencies() -> tuple[PaperLatency, ...]:
    """Both latency tables, row by row, under our names."""
    found = []
    for table, base in ((DYNAMIC, "dynamic"), (BASELINE, "bp")):
        for row in paper_tables()[table].rows:
            model = MODELS[row["backbone"]]
            batch = row.get("batch", BATCHES[model])
            backend = BACKENDS[row["method"]]
            found.append(PaperLatency(table, model, batch, backend, row[base], row["deploy"], row["speedup"]))
    return tuple(found)


@cache
def quantized_rows() -> tuple[PaperInt8, ...]:
    """The INT8 table, row by row, under our names."""
    columns = ("fp32_top1", "fp32_top5", "int8_top1", "int8_top5", "fp32_speed", "int8_speed")
    return tuple(
        PaperInt8(
            MODELS[row["backbone"]],
            "E2E" if row["method"] == "BP" else row["method"],
            *(row[column] for column in columns),
        )
        for row in paper_tables()[INT8].rows
    )


def printed(model: str, batch: int, backend: str) -> dict[str, PaperLatency]:
    """The paper's rows of one setting, by table.

    >>> printed("resnet34", 64, "fp32")["tab:bp_vs_repl_deploy"].speedup
    1.264
    """
    wanted = (model, batch, backend)
    return {row.table: row for row in latencies() if (row.model, row.batch, row.backend) == wanted}
