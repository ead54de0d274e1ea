"""What mkdocs calls: adds the pages that the code writes itself (operators, results, API) to those in docs/."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import replearn
from replearn.experiments.report.collecting import collect
from replearn.experiments.report.page import page
from replearn.experiments.report.sections import Section, sections_of
from replearn.experiments.training.comparison_table import ratio, signed, spread
from replearn.operators import available
from replearn.operators._base.options import Options

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    results = Path(config["config_file_path"]).parent / "benchmarks" / "results"
    collection = collect(results)
    sections = sections_of(collection)
    notebooks = sorted((Path(config["docs_dir"]) / "notebooks").glob("*.ipynb"))
    pages = {
        **{f"notebooks/{path.stem}.md": notebook_page(path) for path in notebooks},
        "operators.md": operators_page(),
        "api.md": api_page(),
        "results.md": results_page(sections),
        "report.html": page(collection, sections, title="Results"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    docs = Path(config["docs_dir"])
    linked = {
        path
        for page in (*docs.rglob("*.md"), *docs.rglob("*.ipynb"))
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if (path := outside(docs, page, link)) is not None
    }
    for path in sorted(linked):
        files.append(File.generated(config, place_of(docs, path), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to notebooks lead to their pages, links out of the documentation to copies in the site."""
    docs = Path(config["docs_dir"])
    source = docs / page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path = outside(docs, source, found[1])
        if path is None:
            return found[0]
        return found[0].replace(found[1], os.path.relpath(docs / place_of(docs, path), source.parent))

    markdown = LINK.sub(moved, markdown)
    return re.sub(r"(\]\([\w./-]*notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)


def outside(docs: Path, page: Path, link: str) -> Path | None:
    """The file of the repository that a page links to, where it is none of the documentation's."""
    path = (page.parent / link).resolve()
    return path if path.is_file() and not path.is_relative_to(docs.resolve()) else None


def place_of(docs: Path, path: Path) -> str:
    """Where a file of the repository lies in the site; a page of another folder is kept as text."""
    name = path.relative_to(docs.resolve().parent).as_posix()
    return f"repository/{name}{'.txt' if path.suffix == '.md' else ''}"


def notebook_page(path: Path) -> str:
    """A notebook's texts, code and stored outputs as Markdown."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = ""
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="What the code above draws" src="data:image/png;base64,{png}">')
            else:
                printed += "".join(output.get("text", data.get("text/plain", "")))
        if printed:
            parts.append(f"```{{ .text .printed }}\n{printed.rstrip()}\n```")
    return "\n\n".join([*parts, ""])


def operators_page() -> str:
    """A card for each operator: its formula, cost and failures from its file's docstring, and its options."""
    head = (
        "# Operators\n\nWritten by the operators' own docstrings. `norm` divides each output row by its length; "
    )
    head += (
        "`prev` and `next` are the kept neighbours; C is the width, H the number of heads, d the token's width.\n"
    )
    return "\n".join([head, *(operator_card(options) for options in own_operators().values())])


def results_page(sections: list[Section]) -> str:
    """Every comparison in a line, with links to the whole report."""
    lines = [
        "# Results",
        "",
        "Made from the committed result files. [The whole report](report.html) has every table,",
    ]
    lines += [
        "figure and run, and the command for each. Time, memory and deployed parameters are ratios to E2E.",
        "",
    ]
    lines += [
        "| comparison | against E2E | against removal | E2E | RepL | time | memory | deployed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for section in sections:
        full, row = section.row("e2e"), section.row("repl")
        if full is not None and row is not None:
            found = (row.against_e2e, row.against_removal)
            against = [f"{each.verdict}<br>{signed(each.mean)}" if each else "" for each in found]
            scores = [spread(each.score, each.std).replace(" ", "\u00a0") for each in (full, row)]
            deployed = section.deployed.get(row.label)
            shares = [ratio(value) for value in (row.time_ratio, row.memory_ratio, deployed)]
            name = f"[{section.title}](report.html#{section.key}), {section.metric.name}"
            cells = [name, *against, *scores, *shares]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Compressed networks, training steps and inference: [measurements](report.html#benchmarks)."]
    return "\n".join([*lines, ""])


def own_operators() -> dict[str, type[Options]]:
    """The operators of the package; what a user's code has registered has no card here."""
    package = import_module("replearn.operators").__name__
    found = available().items()
    return {name: options for name, options in found if options.__module__.startswith(f"{package}.")}


def operator_card(options: type[Options]) -> str:
    """One card as Markdown. The formula is the indented part of the docstring, as it stands there."""
    doc = inspect.getdoc(import_module(options.__module__)) or ""
    title, _, rest = doc.partition("\n")
    formula = "\n".join(line[4:] for line in rest.splitlines() if line.startswith("    "))
    prose = "\n".join(line for line in rest.splitlines() if not line.startswith("    ")).strip()
    prose = re.sub(r"^(Cost|Fails|Learnable):", r"\n**\1:**", prose, flags=re.MULTILINE)
    kinds = ", ".join(options.kinds)
    default = f", the default for `{options.default_for}`" if options.default_for else ""
    lines = [
        f"## {options.__name__}",
        "",
        title,
        "",
        "```text",
        formula,
        "```",
        "",
        prose,
        "",
        f"**For blocks of kind:** {kinds}{default}. **Name in plans and on the command line:** `{options.name}`.",
        "",
    ]
    fields = dataclasses.fields(options)
    if fields:
        lines += ["| option | default |", "|---|---|"]
        lines += [f"| `{field.name}` | `{field.default!r}` |" for field in fields]
    return "\n".join([*lines, ""])


def api_page() -> str:
    """Every public name with its signature and docstring."""
    lines = ["# API", "", "Every public name, by its own docstring. The [tour](tour.md) shows them at work.", ""]
    for name in replearn.__all__:
        thing = getattr(replearn, name)
        if inspect.ismodule(thing):
            lines += [f"## replearn.{name}", "", inspect.getdoc(thing) or "", ""]
            continue
        lines += [f"## replearn.{name}", "", *_signature(name, thing), *_doc(thing), ""]
    return "\n".join(lines)


def _signature(name: str, thing: Any) -> list[str]:
    """The signature as it is written, a line a parameter, without the folders that types come from."""
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return []
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    lines: list[str] = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        argument, _, default = str(each.replace(annotation=each.empty)).partition("=")
        lines.append(f"    {argument}: {_type(each.annotation)}{default and f' = {default}'},")
    back = "" if inspect.isclass(thing) else f" -> {_type(signature.return_annotation)}"
    return ["```python", f"{name}(", *lines, f"){back}", "```", ""]


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)


def _doc(thing: Any) -> list[str]:
    """A docstring as Markdown: what follows `>>>` is fenced."""
    lines: list[str] = []
    fenced = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        code = line.startswith((">>>", "...")) or (fenced and bool(line.strip()))
        if code != fenced:
            lines.append("```pycon" if code else "```")
            fenced = code
        lines.append(line)
    return [*lines, "```"] if fenced else lines
