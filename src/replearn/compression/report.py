"""What compress hands back, and its printed view."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ..planning.table import shown, text_table
from .choose import Choice
from .fit import Fitted
from .heal import Healing
from .measure import Agreement, Price


@dataclass(frozen=True)
class Compressed:
    """A compressed model: `model` is an ordinary module; `print` shows what went, what it costs and keeps."""

    model: nn.Module = field(repr=False)
    removed: tuple[str, ...]
    num_blocks: int
    fitted: Fitted
    before: Price
    promised: Price
    after: Price
    agreement: Agreement
    removal: Agreement
    budget: str
    num_samples: int
    seconds: float
    metric: tuple[float, float] | None = None
    choice: Choice | None = None
    healing: Healing | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return compressed_text(self)


def compressed_text(small: Compressed) -> str:
    title = (
        f"{type(small.model).__name__}: {len(small.removed)} of {small.num_blocks} blocks out "
        f"({shown(small.budget)}), {small.num_samples} samples, {small.seconds:.1f} s"
    )
    rows = [
        _row("latency, ms", small, "latency", lambda v: f"{v * 1e3:.2f}"),
        _row("FLOPs", small, "flops", lambda v: f"{v:.4g}"),
        _row("parameters", small, "parameters", lambda v: f"{v:,.0f}"),
    ]
    lines = [title, "", *text_table(("", "before", "promised", "measured", "ratio"), rows, right=(1, 2, 3, 4)), ""]
    blocks = [
        (shown(b.name), b.form, f"{b.error:.3f}", f"{b.ridge:.0e}" if b.ridge else "") for b in small.fitted.blocks
    ]
    lines += [*text_table(("gone", "in its place", "left unexplained", "ridge"), blocks, right=(2, 3)), ""]
    touched = sum(layer.touched for layer in small.fitted.layers)
    if small.fitted.layers:
        lines.append(f"realigned {touched} of {len(small.fitted.layers)} layers of kept blocks")
    if small.healing is not None:
        lines.append(str(small.healing))
    lines.append(
        f"on held-out samples: same decision as the untouched model {small.agreement.same:.1%} (bare removal "
        f"{small.removal.same:.1%}), divergence {small.agreement.divergence:.4f} ({small.removal.divergence:.4f})"
    )
    if small.metric is not None:
        lines.append(f"metric {small.metric[0]:.4g} -> {small.metric[1]:.4g}")
    lines += [f"note  {shown(note)}" for note in small.notes]
    return "\n".join(lines)


def _row(name: str, small: Compressed, quantity: str, spell: object) -> tuple[str, str, str, str, str]:
    if not callable(spell):
        raise TypeError(f"{spell!r} can't spell a number")
    before, promised, after = (cost.of(quantity) for cost in (small.before, small.promised, small.after))
    return name, spell(before), spell(promised), spell(after), f"{after / before:.3f}" if before else ""
