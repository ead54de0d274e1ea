"""Accuracy against blocks taken out, for compress and what else trains nothing, and a picture of it.

    python benchmarks/compress/sweep.py --published FOLDER --data-root DATA --out sweep.jsonl
    python benchmarks/compress/sweep.py --draw sweep.jsonl docs/compress.svg

Blocks are spread evenly over the stages; "compress, its own choice" picks as many itself. Every method is given
the same unlabelled images. A finished measurement is a line of the results file and is skipped the next time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from results import Results, command, commit, read
from subjects import Subject, evenly, every_second, published
from torch import Tensor, nn
from training_free import reestimate_, removal, replace_me

from replearn.compression import compress
from replearn.compression.matplotlib_figure import new_figure, save

COUNTS = (3, 6, 9, 12)
IMAGES = 500
SIZE = 13.5  # of letters, in points: 12 px where a phone shows the picture at two thirds
LABELS = {
    "compress, its own choice": ("#1f6feb", "o"),
    "compress": ("#54aeff", "o"),
    "removal, BatchNorm re-estimated": ("#8c959f", "s"),
    "ReplaceMe": ("#bf8700", "^"),
    "removal": ("#cf222e", "x"),
}


def made(method: str, subject: Subject, samples: Tensor) -> nn.Module:
    if method == "removal":
        return removal(subject)
    if method == "removal, BatchNorm re-estimated":
        return reestimate_(removal(subject), samples)
    if method == "ReplaceMe":
        return replace_me(subject, samples)
    budget: Any = list(subject.out) if method == "compress" else f"blocks={len(subject.out)}"
    small = compress(subject.model, list(samples.split(125)), budget=budget, form="removal")
    return small.model


def measure(options: argparse.Namespace) -> None:
    results = Results(options.out)
    subject = published("published-resnet56", options.published, options.data_root, torch.device("cpu"), 2000)
    about = {"subject": subject.name, "images": IMAGES, "test_images": 2000}
    origin = {"command": command(), "commit": options.commit or commit()}
    if results.get(**about, method="trained") is None:
        results.add({**about, **origin, "method": "trained", "out": 0, "score": subject.score(subject.model)})
    samples = subject.draw(IMAGES, 0)
    for count in COUNTS:
        part = subject.taking_out(evenly(every_second(subject.model), count))
        for method in LABELS:
            key = {**about, "method": method, "budget": f"blocks={count}"}
            if results.get(**key) is None:
                score = part.score(made(method, part, samples))
                results.add({**key, **origin, "out": count, "score": score})
                print(f"{count} out, {method}: {score:.2f}", flush=True)


def draw(source: Path, target: Path) -> None:
    lines = list(read(source))
    trained = next(line["score"] for line in lines if line["method"] == "trained")
    figure = new_figure(5.6, 5.0)
    axes = figure.subplots()
    axes.axhline(trained, color="#57606a", linewidth=1, linestyle=":")
    axes.annotate(
        f"trained {trained:.1f}",
        (0, trained),
        xytext=(0, 4),
        textcoords="offset points",
        color="#57606a",
        fontsize=SIZE,
    )
    for label, (color, marker) in LABELS.items():
        points = sorted((line["out"], line["score"]) for line in lines if line["method"] == label)
        shown = [(0, trained), *points]
        axes.plot(*zip(*shown, strict=True), color=color, marker=marker, label=label, linewidth=1.8, markersize=5)
    axes.set_xlabel("blocks taken out of 27", fontsize=SIZE)
    axes.set_ylabel("accuracy, %", fontsize=SIZE)
    axes.tick_params(labelsize=SIZE)
    axes.set_ylim(0, 100)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", fontsize=SIZE)
    save(figure, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"))
    parser.add_argument("--commit")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("RESULTS", "PICTURE"))
    options = parser.parse_args()
    if options.draw:
        draw(*options.draw)
    else:
        measure(options)


if __name__ == "__main__":
    main()
