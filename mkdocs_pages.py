"""What mkdocs calls: adds the pages that the code writes itself (operators, results, API) to those in docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from replearn.experiments.report.collecting import collect
from replearn.experiments.report.page import page
from replearn.experiments.report.parts import view_of
from replearn.experiments.report.sections import sections_of
from replearn.experiments.report.site import api_page, operators_page, results_page


def on_files(files: Files, config: Any) -> Files:
    results = Path(config["config_file_path"]).parent / "benchmarks" / "results"
    collection = collect(results)
    sections = sections_of(collection)
    pages = {
        "operators.md": operators_page(),
        "api.md": api_page(),
        "results.md": results_page(view_of(collection, sections)),
        "report.html": page(collection, sections, title="Results"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files
