"""What the paper prints about inference: an A100-80GB, synthetic images of 224x224, synchronised medians."""

from __future__ import annotations

from dataclasses import dataclass


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


DYNAMIC, BASELINE, INT8 = "tab:dynamic_vs_deploy", "tab:bp_vs_repl_deploy", "tab:repl_quant_imagenet"
# the second table does not print its batch sizes; its deployed column is the first table's at these
LATENCIES = (
    PaperLatency(DYNAMIC, "resnet34", 64, "fp32", 7.861, 7.858, 1.000),
    PaperLatency(DYNAMIC, "vit_small_16", 64, "fp32", 37.628, 37.404, 1.006),
    PaperLatency(DYNAMIC, "vit_small_16", 1, "fp32", 4.381, 3.847, 1.139),
    PaperLatency(DYNAMIC, "vit_small_16", 64, "amp", 12.103, 11.860, 1.020),
    PaperLatency(DYNAMIC, "resnet101", 32, "fp32", 15.062, 14.868, 1.013),
    PaperLatency(DYNAMIC, "resnet101", 1, "fp32", 9.237, 8.368, 1.104),
    PaperLatency(BASELINE, "resnet34", 64, "fp32", 9.931, 7.858, 1.264),
    PaperLatency(BASELINE, "resnet34", 64, "channels_last", 9.401, 7.385, 1.273),
    PaperLatency(BASELINE, "resnet34", 64, "channels_last+compile", 7.237, 5.608, 1.290),
    PaperLatency(BASELINE, "vit_small_16", 64, "fp32", 43.999, 37.404, 1.176),
    PaperLatency(BASELINE, "vit_small_16", 64, "amp", 13.728, 11.860, 1.157),
    PaperLatency(BASELINE, "resnet101", 32, "fp32", 16.646, 14.868, 1.120),
)


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


QUANTIZED = (
    PaperInt8("vit_small_16", "E2E", 63.760, 83.864, 63.242, 83.290, 1022.948, 45.788),
    PaperInt8("vit_small_16", "RepL", 65.336, 85.766, 64.222, 84.534, 1072.901, 48.723),
    PaperInt8("resnet34", "E2E", 73.660, 91.152, 73.496, 91.086, 1757.045, 194.469),
    PaperInt8("resnet34", "RepL", 75.112, 91.914, 74.832, 91.710, 1837.255, 249.975),
)


def printed(model: str, batch: int, backend: str) -> dict[str, PaperLatency]:
    """The paper's rows of one setting, by table."""
    return {row.table: row for row in LATENCIES if (row.model, row.batch, row.backend) == (model, batch, backend)}
