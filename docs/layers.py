"""Draw docs/layers.svg: the folders in layer order, their imports, and the way of a model.

    python docs/layers.py          # writes docs/layers.svg
    python docs/layers.py --check  # fails if the committed picture is not what the code says

Boxes are folders, arrows imports that grimp finds, names the public functions of each folder.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from textwrap import wrap

import grimp

import replearn

PICTURE = Path(__file__).with_name("layers.svg")
JOBS = {
    "errors": "the one error class",
    "blocks": "recognise blocks and stacks",
    "operators": "what stands in a block's place",
    "planning": "decide; touch nothing",
    "surgery": "replace blocks, save and load",
    "costs": "predict costs from shapes",
    "fitting": "fit and choose on data",
    "fast": "make any network faster",
    "deployment": "back to ordinary modules",
    "compression": "all steps in one call",
    "analysis": "measure the paper's theory",
    "models": "models that no library ships",
    "experiments": "training, recipes, bench, report",
    "cli": "the command line",
}
WAY = {  # where a model stops, and what it is given there or leaves with
    "blocks": "find_stacks: Stack",
    "planning": "plan: Plan",
    "surgery": "replace_: before training",
    "fitting": "calibrate_: after training",
    "deployment": "deploy: plain modules",
}
ROW, TOP, LEFT, BOX, LINE, WIDTH = 60, 56, 165, 212, 690, 880
USERS = ("experiments", "cli")  # built on the library
MOST = 36  # characters of names in a line
STYLE = """
svg { --paper: #fff; --ink: #1f2933; --soft: #52606d; --box: #eef2f6 }
svg { --edge: #7b8794; --way: #0b69a3 }
@media (prefers-color-scheme: dark) {
  svg { --paper: #1b1f24; --ink: #e6e9ee; --soft: #aab4c0; --box: #2a313a }
  svg { --edge: #8792a2; --way: #6cb8f0 }
}
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.job, .inner { font-size: 12px; fill: var(--soft) }
.folder, .public { font-weight: 600 }
.public, .inner { font-family: ui-monospace, monospace }
.box { fill: var(--box); stroke: var(--edge) }
.import { fill: none; stroke: var(--edge); stroke-width: 1.3 }
.user { opacity: .4 }
.way { fill: none; stroke: var(--way); stroke-width: 2.5 }
.stop { fill: var(--way) }
.note { fill: var(--way); font-size: 12px }
"""


def layers() -> list[str]:
    """The folders in the order of import-linter's contract, the one that imports nothing first."""
    settings = tomllib.loads((PICTURE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        found
        for found in settings["tool"]["importlinter"]["contracts"]
        if found["type"] == "layers"
    )
    names = [re.findall(r"\w+", layer) for layer in reversed(contract["layers"])]
    return [name for layer in names for name in layer if _exists(name)]


def imports() -> set[tuple[str, str]]:
    """Pairs of folders of which the first imports the second."""
    graph = grimp.build_graph("replearn", exclude_type_checking_imports=True, cache_dir=None)
    modules = [name.split(".") for name in graph.modules]
    pairs = {
        (parts[1], imported.split(".")[1])
        for parts in modules
        for imported in graph.find_modules_directly_imported_by(".".join(parts))
        if len(parts) > 1 and "." in imported
    }
    known = layers()
    return {
        (importer, imported)
        for importer, imported in pairs
        if importer != imported and importer in known
    }


def names_of(folder: str) -> tuple[list[str], list[str]]:
    """The names of a folder that are public as `replearn.NAME`, and as `replearn.FOLDER.NAME`."""
    public = [name for name in replearn.__all__ if home_of(getattr(replearn, name)) == folder]
    module = import_module(f"replearn.{folder}")
    if folder in public:  # the folder itself is public: operators, models
        return public, []
    names = [name for name in getattr(module, "__all__", []) if name not in public]
    return public, [name for name in names if inspect.isfunction(getattr(module, name))]


def home_of(thing: object) -> str:
    name = thing.__name__ if inspect.ismodule(thing) else thing.__module__  # type: ignore[attr-defined]
    return str(name).split(".")[1]


def rows() -> dict[str, float]:
    """The middle of each folder's box, from the top."""
    return {name: TOP + ROW * (number + 0.5) for number, name in enumerate(layers())}


def _exists(name: str) -> bool:
    home = Path(replearn.__file__).parent
    return (home / name / "__init__.py").exists() or (home / f"{name}.py").exists()


def draw() -> str:
    middle = rows()
    height = TOP + ROW * len(middle) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The layers of replearn, their imports, and the way of a model through them">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="var(--paper)"/>',
        _text(24, 30, "imports (all: errors)", "job"),
        _text(LEFT + BOX + 14, 30, "public functions", "job"),
        *_arrows(middle),
        *_boxes(middle),
        *_way(middle),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arrows(middle: dict[str, float]) -> Iterator[str]:
    order = list(middle)
    for importer, imported in sorted(
        imports(), key=lambda pair: (order.index(pair[0]), order.index(pair[1]))
    ):
        if imported == "errors":
            continue
        if order.index(imported) > order.index(importer):
            raise SystemExit(f"{importer} imports {imported}, which comes after it.")
        start, end = middle[importer] - 8, middle[imported] + 8
        bend = LEFT - 20 - 13 * (order.index(importer) - order.index(imported))
        curve = f"M{LEFT} {start:g}C{bend} {start:g} {bend} {end:g} {LEFT - 2} {end:g}"
        style = "import user" if importer in USERS else "import"
        title = f"<title>{importer} imports {imported}</title>"
        yield f'<path class="{style}" marker-end="url(#head)" d="{curve}">{title}</path>'


def _boxes(middle: dict[str, float]) -> Iterator[str]:
    for folder, y in middle.items():
        yield f'<rect class="box" x="{LEFT}" y="{y - 22:g}" width="{BOX}" height="44" rx="6"/>'
        yield _text(LEFT + 12, y - 4, folder, "folder")
        yield _text(LEFT + 12, y + 13, JOBS.get(folder, ""), "job")
        public, inner = names_of(folder)
        lines = [(line, "public") for line in wrap(", ".join(public), MOST)]
        if inner:
            text = f"{folder}: {', '.join(inner)}"
            fitted = wrap(text, MOST, max_lines=max(1, 3 - len(lines)), placeholder=" ...")
            lines += [(line, "inner") for line in fitted]
        for number, (line, style) in enumerate(lines):
            yield _text(LEFT + BOX + 14, y + 4 + 16 * (number - (len(lines) - 1) / 2), line, style)


def _way(middle: dict[str, float]) -> Iterator[str]:
    stops = {folder: y for folder, y in middle.items() if folder in WAY}
    last = max(stops.values())
    yield f'<path class="way" marker-end="url(#head)" d="M{LINE} {TOP - 8}V{last + 48:g}"/>'
    yield _text(LINE - 30, TOP - 18, "a model", "note")
    yield _text(LINE - 50, last + 68, "an ordinary model", "note")
    for folder, y in stops.items():
        yield f'<circle class="stop" cx="{LINE}" cy="{y:g}" r="6"/>'
        yield _text(LINE + 14, y + 4, WAY[folder], "note")
    yield _text(LINE + 14, middle["fast"] + 4, "your training loop", "note")


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def main() -> None:
    made = draw()
    if "--check" in sys.argv[1:]:
        if PICTURE.read_text(encoding="utf-8") != made:
            raise SystemExit("docs/layers.svg is out of date: python docs/layers.py")
        return
    PICTURE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
