"""The printed view of the inference benchmark: ours beside the paper's."""

from __future__ import annotations

from typing import Any

from .inference_paper import BASELINE
from .inference_paper import DYNAMIC as TABLE
from .inference_sides import DEPLOYED, DYNAMIC, E2E, OPERATORS


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
            told.append(
                f"{label} {row['speedup'][key]['median']:.3f}"
                + (f" [paper {paper['speedup']:.3f}]" if paper else "")
            )
    return f"{row['model']:18} {row['batch']:5} {row['backend']:27} {shown}   {', '.join(told)}"


HEADER = (
    f"{'model':18} {'batch':>5} {'backend':27} {'E2E':>8}  {'dynamic':>8}  {'op. only':>8}  {'deployed':>8}   "
    "deployed is faster than ... by"
)


def heading(setting: dict[str, Any]) -> str:
    """What the sides are, in a line."""
    sums = f"its operators' sums {'merged into weights' if setting['merge'] else 'as they are'}"
    form = "flat graphs, " if setting["flatten"] else ""
    return (
        f"E2E and RepL deployed: {form}BatchNorms folded, under amp weights cast once; RepL deployed: "
        f"{sums}. dynamic and op. only: as trained, and as timm's reparameterize_model. graph: replayed as a CUDA "
        "graph, all sides, with the copies of inputs and outputs. fuse: convolutions fused with sums and ReLUs by "
        "cuDNN. Times are medians in milliseconds a batch."
    )


def lines_of_counts(counts: dict[str, Any]) -> list[str]:
    """E2E over deployed RepL by what is counted: what the speedup would be if that alone took time."""
    lines = ["by counting, E2E over RepL deployed:"]
    for model, found in counts.items():
        for numbers, sides in found.items():
            base, other = sides[E2E], sides[DEPLOYED]
            told = ", ".join(
                f"{what.replace('_', ' ')} {base[what]:,} / {other[what]:,} = {base[what] / other[what]:.3f}"
                for what in base
            )
            lines.append(f"{model:18} {numbers:5} {told}")
    return lines
