"""What mkdocs calls: adds the pages that the code writes itself (operators, results, API) to those in docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from replearn.experiments.report.site import api_page, operators_page
from replearn.experiments.report.site_results import results_page


def on_files(files: Files, config: Any) -> Files:
    results = Path(config["config_file_path"]).parent / "benchmarks" / "results"
    pages = {"operators.md": operators_page(), "results.md": results_page(results), "api.md": api_page()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files
