"""Draw docs/figures from the demo's runs on digits: t-SNE, feature maps, and one analysis.

python docs/figures.py  # three minutes on a CPU; OMP_NUM_THREADS=1, as make demo sets it
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).with_name("figures")


def replearn(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "replearn", *words], check=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        runs = [f"{place}/digits/{method}/seed-0" for method in ("e2e", "repl")]
        for method in ("e2e", "repl"):
            replearn("train", "demo", "--method", method, "--device", "cpu", "--out", place)
        replearn(
            "figures", *runs, "--out", f"{place}/figures", "--samples", "300", "--device", "cpu"
        )
        analysis = ["--first", "2", "--samples", "500", "--batch-size", "50"]
        analysis += ["--operator", "basic:correction=full", "--convergence", "400"]
        replearn("analyze", runs[0], *analysis, "--device", "cpu", "--out", place)
        shutil.copy(f"{place}/analysis.svg", FOLDER / "analysis.svg")
        shutil.copy(f"{place}/analysis.json", FOLDER / "analysis.json")
        shutil.copy(f"{place}/figures/features.svg", FOLDER / "features.svg")
        shutil.copy(f"{place}/figures/feature_maps.png", FOLDER / "feature_maps.png")


if __name__ == "__main__":
    main()
