"""The printed view of the inference benchmark: ours beside the paper's."""

from __future__ import annotations

from typing import Any

from .inference_paper import BASELINE
from .inference_paper import DYNAMIC as TABLE
from .inference_sides import DEPLOYED, DYNAMIC, E2E, OPERATORS

HEADING = (
    "E2E and RepL deployed: flat graphs, BatchNorms folded, under amp weights cast once; RepL deployed: its "
    "operators' sums merged into weights. dynamic and op. only: as trained, and as timm's reparameterize_model. "
    "graph: replayed as a CUDA graph, all sides, with the copies of inputs and outputs. fuse: convolutions fused "
    "with sums and ReLUs by cuDNN. Times are medians in milliseconds a batch."
)
HEADER = (
    f"{'model':18} {'batch':>5} {'backend':27} {'E2E':>8}  {'dynamic':>8}  {'op. only':>8}  {'deployed':>8}   "
    "deployed is faster than ... by"
)


def line_of(row: dict[str, Any]) -> str:
    """One cell in a line: milliseconds, and the ratios with the paper's in brackets."""
    times = row["milliseconds"]
    shown = "  ".join(
        f"{times[kind]['median']:8.3f}" if kind in times else " " * 8
        for kind in (E2E, DYNAMIC, OPERATORS, DEPLOYED)
    )
    ratios = [("dynamic", f"{DEPLOYED} against {DYNAMIC}", TABLE), ("E2E", f"{DEPLOYED} against {E2E}", BASELINE)]
    told = []
    for label, key, table in ratios:
        if key in row["speedup"]:
            paper = row["paper"].get(table)
            printed = f" [paper {paper['speedup']:.3f}]" if paper else ""
            told.append(f"{label} {row['speedup'][key]['median']:.3f}{printed}")
    return f"{row['model']:18} {row['batch']:5} {row['backend']:27} {shown}   {', '.join(told)}"
