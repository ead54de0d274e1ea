"""What the paper prints about inference: an A100-80GB, synthetic images of 224x224, synchronised medians."""

from __future__ import annotations

from typing import Any

from ..training.paper import paper_tables

DYNAMIC, BASELINE, INT8 = "tab:dynamic_vs_deploy", "tab:bp_vs_repl_deploy", "tab:repl_quant_imagenet"
MODELS = {"ResNet34": "resnet34", "ResNet-34": "resnet34", "ResNet101": "resnet101"}
MODELS |= {"ViT-S": "vit_small_16", "ViT-S/16": "vit_small_16"}
BACKENDS = {"RepL": "fp32", "RepL + AMP": "amp", "FP32": "fp32", "AMP": "amp", "channels-last": "channels_last"}
BACKENDS |= {"channels-last + compile": "channels_last+compile"}
# the second table does not print its batch sizes; its deployed column is the first table's at these
BATCHES = {"resnet34": 64, "vit_small_16": 64, "resnet101": 32}


def printed(model: str, batch: int, backend: str) -> dict[str, dict[str, float]]:
    """The paper's milliseconds of one setting by table; `base` is dynamic RepL in DYNAMIC, and BP in BASELINE.

    >>> printed("resnet34", 64, "fp32")["tab:bp_vs_repl_deploy"]["speedup"]
    1.264
    """
    found = {}
    for table, base in ((DYNAMIC, "dynamic"), (BASELINE, "bp")):
        for row in paper_tables()[table].rows:
            name = MODELS[row["backbone"]]
            setting = (name, row.get("batch", BATCHES[name]), BACKENDS[row["method"]])
            if setting == (model, batch, backend):
                found[table] = {"base": row[base], "deployed": row["deploy"], "speedup": row["speedup"]}
    return found


def printed_int8(model: str, method: str) -> dict[str, Any] | None:
    """One row of the INT8 table; its float32 column is a GPU's and its INT8 column a CPU's."""
    for row in paper_tables()[INT8].rows:
        if (MODELS[row["backbone"]], row["method"].replace("BP", "E2E")) == (model, method):
            speeds = {"float32_images_per_second": row["fp32_speed"], "int8_images_per_second": row["int8_speed"]}
            return speeds | {"float32_top1": row["fp32_top1"], "int8_top1": row["int8_top1"]}
    return None
