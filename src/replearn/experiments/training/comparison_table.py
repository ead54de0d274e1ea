"""The printed view of a comparison: scores, then costs."""

from collections.abc import Sequence

from ...planning.table import text_table
from .compare import Comparison, Row
from .intervals import Difference
from .metrics import Metric

LEGEND = """\
{metric} is the last epoch's{unit}, mean ± std over seeds; best is the best epoch's
differences are taken seed by seed; in brackets the 95 % interval of their mean, each row on its own
better and worse: p < 0.05 in a paired t-test, corrected by Holm's method for all differences of the table
time, memory and share (of the parameters) are ratios to E2E"""


def comparison_table(comparison: Comparison) -> str:
    """A comparison as text: accuracies with differences and verdicts, then costs, then notes."""
    rows, metric = comparison.rows, comparison.metric
    lines = [
        heading(comparison),
        "",
        *shown(score_columns(rows, metric), left=("method", "against E2E", "against removal")),
        "",
        *shown(cost_columns(rows), left=("method",)),
        "",
    ]
    lines += [f"note: {note}" for note in comparison.notes]
    unit = " in percent" if metric.unit == "%" else "" if metric.higher_is_better else " (lower is better)"
    return "\n".join([*lines, LEGEND.format(metric=metric.name, unit=unit)])


def heading(comparison: Comparison) -> str:
    """Which recipe, model, data and length, on what hardware: `demo: ... on digits, 12 epochs (cpu, 2 cores)`."""
    length = f"{comparison.epochs} epoch{'s' if comparison.epochs > 1 else ''}"
    return f"{comparison.recipe}: {comparison.model} on {comparison.data}, {length} ({comparison.hardware})"


def score_columns(rows: Sequence[Row], metric: Metric) -> dict[str, list[str]]:
    """Scores by column; a column without values has empty texts."""
    several = len({row.epochs for row in rows}) > 1
    paper = [row.paper if row.paper and row.paper.top5 else None for row in rows]
    others = [name for name in (rows[0].also if rows else ()) if name != "top5"]  # top5 has a column of its own
    return {
        "method": [row.label for row in rows],
        "seeds": [str(len(row.seeds)) for row in rows],
        "epochs": [str(row.epochs) if several else "" for row in rows],
        metric.name: [spread(row.score, row.std) for row in rows],
        "best": [f"{row.best:.2f}" for row in rows],
        **{name: [f"{row.also[name]:.2f}" for row in rows] for name in others},
        "against E2E": [difference(row.against_e2e) for row in rows],
        "against removal": [difference(row.against_removal) for row in rows],
        "paper": [spread(row.paper.score, row.paper.std) if row.paper else "" for row in rows],
        "top-5": [f"{row.also['top5']:.2f}" if any(paper) else "" for row in rows],
        "paper top-5": [spread(row.top5, row.top5_std) if row and row.top5 else "" for row in paper],
    }


def cost_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    full = next((row.parameters for row in rows if row.method == "e2e"), None)
    return {
        "method": [row.label for row in rows],
        "s/epoch": [f"{row.seconds:.2f}" if row.alone else "" for row in rows],
        "time": [ratio(row.time_ratio) for row in rows],
        "paper time": [ratio(row.paper_time_ratio) for row in rows],
        "GB": [f"{row.memory / 1e9:.2f}" if row.memory and row.alone else "" for row in rows],
        "memory": [ratio(row.memory_ratio) for row in rows],
        "paper memory": [ratio(row.paper_memory_ratio) for row in rows],
        "parameters": [f"{row.parameters:,}" for row in rows],
        "share": [ratio(row.parameters / full if full else None) for row in rows],
        "MFLOPs": [f"{row.flops / 1e6:,.1f}" for row in rows],
    }


def shown(columns: dict[str, list[str]], left: Sequence[str]) -> list[str]:
    """A table of the columns with values."""
    kept = {head: cells for head, cells in columns.items() if any(cells)}
    right = [index for index, head in enumerate(kept) if head not in left]
    return text_table(list(kept), list(zip(*kept.values(), strict=True)), right)


def spread(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def difference(value: Difference | None) -> str:
    """`+0.41 [+0.10, +0.72] better`; without an interval, the reason why there is none."""
    return "" if value is None else f"{signed(value.mean)} {interval(value)} {value.verdict}"


def interval(value: Difference) -> str:
    if value.low is None or value.high is None:
        return "(1 seed)" if len(value.seeds) == 1 else "(no spread)"
    return f"[{signed(value.low)}, {signed(value.high)}]"


def signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # adding 0.0 turns -0.0 into 0.0
