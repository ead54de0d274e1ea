"""The picture of kept_after_replacement.py: what is kept against rank, interval and number of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(about: dict[str, Any], path: Path) -> None:
    """The metric against rank, interval and calibration samples, with removal and the full model beside it."""
    from matplotlib.figure import Figure

    metric, samples = about.get("metric", "accuracy"), about.get("samples", "images")
    figure = Figure(figsize=(13, 3.9), dpi=150, layout="constrained")
    by_rank, by_interval, by_images = figure.subplots(1, 3, sharey=True)
    colours = ("#1f5fa8", "#c2570c", "#15803d")
    ranked = about["curves"]["rank"]
    placements = list(dict.fromkeys((row["interval"], row["first"]) for row in ranked))
    ranks = sorted({row["rank"] for row in ranked if row["rank"]})
    ticks = ["span", *map(str, ranks), "full"]
    for (interval, first), tint in zip(placements, colours, strict=False):
        rows = [row for row in ranked if (row["interval"], row["first"]) == (interval, first)]
        whole = max((row["targets"] for row in rows), default=0)
        # a rank that is too large for some blocks leaves them in place, which is not the same feat
        kept = [row for row in rows if row["operator"] != "removal" and row["targets"] == whole]
        places = [ticks.index(str(row["rank"])) if row["rank"] else len(ticks) - 1 for row in kept]
        places[:1] = [0] if kept else []
        label = f"K={interval}, first={first}" if kept else None
        by_rank.plot(places, [row[metric] for row in kept], "o-", color=tint, label=label, ms=4)
        for row in rows:
            if row["operator"] == "removal":
                by_rank.axhline(row[metric], color=tint, lw=0.8, ls="--")
    by_rank.set_xticks(range(len(ticks)), ticks)
    by_rank.set_xlabel("rank of the correction (dashed: removal)")
    if metric == "perplexity":
        by_rank.set_yscale("log")
    by_rank.set_ylabel("test accuracy kept, %" if metric == "accuracy" else f"test {metric} (lower is better)")
    for axes, name, value in (
        (by_interval, "interval", "interval"),
        (by_images, "images", f"calibration_{samples}"),
    ):
        rows = about["curves"][name]
        labels = list(dict.fromkeys(row["operator"] for row in rows))
        for label, tint in zip(labels, ("#6b7280", *colours), strict=False):
            points = [(row[value], row[metric]) for row in rows if row["operator"] == label]
            axes.plot(*zip(*points, strict=True), "o-", color=tint, label=label, ms=4)
    by_interval.set_xticks(sorted({row["interval"] for row in about["curves"]["interval"]}))
    by_interval.set_xlabel("interval K (first=2)")
    by_images.set_xscale("log")
    counts = sorted({row[f"calibration_{samples}"] for row in about["curves"]["images"]})
    by_images.set_xticks(counts, [str(count) for count in counts])
    by_images.set_xticks([], minor=True)
    by_images.set_xlabel(f"calibration {samples} (K=2, first=2)")
    for axes in (by_rank, by_interval, by_images):
        axes.axhline(about[f"trained_{metric}"], color="#6b7280", lw=0.9, ls=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7.5, frameon=False)
        axes.tick_params(labelsize=8)
    figure.suptitle(
        f"{about['model']}: blocks replaced afterwards, no training (dotted: the full model)", fontsize=10
    )
    figure.savefig(path)
