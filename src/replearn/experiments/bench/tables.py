"""The printed view of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from ...costs.data import flops, size
from ...planning.table import text_table
from .cases import E2E
from .epochs import EpochRow
from .record import Comparison

SAID = ("milliseconds", "memory", "activations", "training_flops")
LEGEND = """\
time and memory are ratios to E2E in the same run, medians over rounds (of all builds) with quartiles in brackets
eta: the operators' FLOPs over the removed blocks'
yield: what RepL saved of what arithmetic allows, (1 - removal) (1 - eta)
synthesis: RepL over RepL with its weights given (frozen: given as constants)
said: what the cost model predicts from shapes alone; E2E's line has units, the others are ratios to it"""


def training_table(comparison: Comparison) -> str:
    """One case on one backend as text."""
    head = ("candidate", "ms a step", "time", "memory", "of E2E", "parameters")
    rows = []
    for row in comparison.rows:
        memory = (gibibytes(row.memory), share(row.memory_ratio))
        rows.append((row.label, f"{row.timing.median:.2f}", str(row.time), *memory, f"{row.parameters:,}"))
    lines = [f"{comparison.title}; {comparison.backend}", "", *text_table(head, rows, right=(1, 3, 4, 5))]
    facts = [f"eta {comparison.eta:.3f}"]
    if comparison.yield_ is not None:
        facts.append(f"yield {comparison.yield_:.2f}")
    if comparison.synthesis and comparison.frozen:
        facts += [f"synthesis {comparison.synthesis}", f"frozen {comparison.frozen}"]
    lines += ["", ", ".join(facts), *(f"note: {note}" for note in comparison.notes)]
    return "\n".join([*lines, *promise_lines(comparison)])


def promise_lines(comparison: Comparison) -> list[str]:
    """What was predicted beside what was measured, as ratios to E2E; E2E's own line has the numbers themselves."""
    base = comparison.row(E2E)
    if base.promised is None:
        return []
    rows: list[tuple[str, ...]] = []
    for row in comparison.rows:
        if (said := row.promised) is None:
            continue
        if row is base:
            time = "" if said.milliseconds is None else f"{said.milliseconds:.2f} ms"
            held = "" if row.memory is None else size(row.memory)
            work = (size(said.activations), flops(said.training_flops))
            rows.append((row.label, time, f"{row.timing.median:.2f} ms", size(said.memory), held, *work))
        else:
            time, memory, *rest = (share(said.over(base.promised, what)) for what in SAID)
            rows.append((row.label, time, share(row.time.median), memory, share(row.memory_ratio), *rest))
    head = ("candidate", "time: said", "measured", "memory: said", "measured", "activations: said", "FLOPs: said")
    machine = comparison.machine
    where = f"{machine.name}: {machine.source}" if machine else "no time: name a machine with --gpu, or --probe"
    return ["", f"predicted beside measured ({where})", "", *text_table(head, rows, right=(1, 2, 3, 4, 5, 6))]


def epochs_table(title: str, rows: Sequence[EpochRow]) -> str:
    """Whole epochs as text."""
    head = ("run", "s an epoch", "time", "samples/s each", "in all", "memory")
    cells = []
    for row in rows:
        speeds = (f"{row.images_per_second:,.0f}", f"{row.images_per_second_in_all:,.0f}")
        time = (f"{row.timing.median / 1000:.3f}", str(row.time))
        cells.append((row.label, *time, *speeds, gibibytes(row.memory)))
    notes = sorted({f"note: {row.label}: {note}" for row in rows for note in row.notes})
    return "\n".join([title, "", *text_table(head, cells, right=(1, 3, 4, 5)), "", *notes])


def share(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def gibibytes(memory: int | None) -> str:
    return "" if memory is None else f"{memory / 2**30:.2f} GiB"
