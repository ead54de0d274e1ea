"""Whatever the documentation shows runs, checks itself, and names things that exist."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import HERE, runs_kernels

import replearn
from replearn.experiments import recipes
from replearn.operators import functional
from replearn.operators._base import options

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEW_FILE = re.compile(r"# src/replearn/([\w/]+)/(\w+\.py)\n")  # a block that is a file of the package
MOST_LINES = {"docs/design.md": 250, "docs/speed.md": 150, "docs/deployment.md": 200, "README.md": 150}

pages_with_code = [page for page in PAGES if FENCE.search(page.read_text(encoding="utf-8"))]
modules_with_doctests = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(SOURCE.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(page: Path) -> list[tuple[int, ast.Module]]:
    """The page's blocks, parsed with the line numbers of the page, so that a traceback points there."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(1))
        found.append((line + 1, ast.parse("\n" * line + match[1], filename=str(page))))
    return found


def new_files(page: Path) -> dict[int, tuple[str, str, str]]:
    """The blocks that are files to be added to the package, by their line: folder, name and text."""
    text = page.read_text(encoding="utf-8")
    return {
        text.count("\n", 0, match.start(1)) + 1: (file[1], file[2], match[1])
        for match in FENCE.finditer(text)
        if (file := NEW_FILE.match(match[1]))
    }


def has_check(block: ast.Module) -> bool:
    """An assert, torch.testing.assert_close or the like, or pytest.raises."""
    for node in ast.walk(block):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called.startswith("assert_") or called == "raises":
                return True
    return False


@pytest.mark.parametrize("page", pages_with_code, ids=name_of)
def test_every_block_of_a_page_contains_a_check(page: Path) -> None:
    files = new_files(page)
    unchecked = [line for line, block in python_blocks(page) if not has_check(block) and line not in files]
    assert not unchecked, f"{name_of(page)}: the blocks at lines {unchecked} check nothing"


class Extended:
    """The package with files added to its folders, each in a temporary folder on that folder's path."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.paths: list[tuple[list[str], str]] = []

    def add(self, folder: str, name: str, text: str) -> None:
        package = importlib.import_module(f"replearn.{folder.replace('/', '.')}")
        place = self.home / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
        package.__path__.append(str(place))
        self.paths.append((package.__path__, str(place)))
        forget_lists()

    def restore(self) -> None:
        for paths, place in self.paths:
            paths.remove(place)
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(self.home)):
                package, _, last = name.rpartition(".")
                vars(sys.modules[package]).pop(last, None)
                del sys.modules[name]
        forget_lists()


def forget_lists() -> None:
    """Folders that are lists may have been walked already."""
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        if name.startswith("replearn."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "").startswith("replearn."):
                    value.cache_clear()


@pytest.fixture
def extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Extended]:
    """What a page adds or registers is gone after it: other tests walk over all of them."""
    replearn.operators.available()
    monkeypatch.setattr(options, "registry", dict(options.registry))
    monkeypatch.setattr(functional, "_faster", dict(functional._faster))
    package = Extended(tmp_path / "added")
    yield package
    package.restore()


@pytest.mark.parametrize("page", pages_with_code, ids=name_of)
def test_the_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, extended: Extended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pages save checkpoints
    run(page, extended)


def run(page: Path, extended: Extended) -> dict[str, Any]:
    """Add the page's files to the package and run its other blocks; the names that they leave."""
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    files = new_files(page)
    for line, block in python_blocks(page):
        if line in files:
            extended.add(*files[line])
        else:
            exec(compile(block, str(page), "exec"), namespace)
    return namespace


@runs_kernels
def test_the_kernel_of_its_page_computes_the_reference(extended: Extended) -> None:
    page = run(ROOT / "docs" / "how-to" / "new-kernel.md", extended)
    for given in page["examples"](HERE, torch.bfloat16):
        assert page["fits"](*given)
        torch.testing.assert_close(page["silu_mul"](*given), page["reference"](*given))
        torch.library.opcheck(torch.ops.replearn.silu_mul.default, given)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("new-*.md")), ids=name_of)
def test_adding_something_is_one_file_and_no_edited_one(page: Path) -> None:
    """A kernel may have a second file, with its Triton code."""
    files = [f"{folder}/{name}" for folder, name, _ in new_files(page).values()]
    assert len([file for file in files if "/_triton/" not in file]) == 1
    assert not any((SOURCE / "replearn" / file).exists() for file in files)


@pytest.mark.parametrize(
    "script", [ROOT / "docs" / f"{name}.py" for name in ("layers", "plan_picture")], ids=name_of
)
def test_a_picture_is_what_the_code_says(script: Path) -> None:
    """`python docs/layers.py` draws it."""
    made = runpy.run_path(str(script))
    assert made["PICTURE"].read_text(encoding="utf-8") == made["draw"]()


@pytest.mark.parametrize("name", MOST_LINES)
def test_long_pages_stay_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[name]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_lines_are_short_outside_of_tables(page: Path) -> None:
    written = re.sub(r"<!-- table.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for line in written.splitlines() if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=name_of)
def test_code_fits_the_column_of_the_site(page: Path) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=name_of)
def test_a_page_opens_with_what_the_reader_can_do_after_it(page: Path) -> None:
    first = page.read_text(encoding="utf-8").split("\n\n")[1]
    assert first.startswith("After this page") or page.name == "index.md"


@pytest.mark.parametrize("name", modules_with_doctests)
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=name_of)
def test_every_example_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--epochs", "1", "--seeds", "1"] if example.stem == "demo" else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), *words])
    narrow = replace(recipes.recipe("demo"), model="cifar_resnet:26:4")
    monkeypatch.setattr(recipes, "recipe", lambda name: narrow)
    runpy.run_path(str(example), run_name="__main__")


def test_the_readme_has_runnable_code() -> None:
    assert ROOT / "README.md" in pages_with_code
    assert ROOT / "docs" / "tour.md" in pages_with_code


@pytest.mark.parametrize("name", replearn.__all__)
def test_the_tour_uses_every_public_name(name: str) -> None:
    code = "\n".join(ast.unparse(block) for _, block in python_blocks(ROOT / "docs" / "tour.md"))
    assert re.search(rf"\breplearn\.{name}\b", code), f"docs/tour.md never uses replearn.{name}"


@pytest.mark.parametrize("operator", replearn.operators.available().values(), ids=lambda found: found.__name__)
def test_the_tour_uses_every_operator(operator: type) -> None:
    code = "\n".join(ast.unparse(block) for _, block in python_blocks(ROOT / "docs" / "tour.md"))
    assert re.search(rf"\boperators\.{operator.__name__}\(", code)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_the_package_named_on_a_page_exist(page: Path) -> None:
    """`operators/basic.py` in backquotes is a file below src/replearn, or below the repository."""
    named = re.findall(r"`([\w./-]+\.(?:py|md|toml|txt))`", page.read_text(encoding="utf-8"))
    homes = (ROOT, SOURCE / "replearn")
    assert [name for name in named if not any((home / name).exists() for home in homes)] == []


def commands_on(page: Path) -> list[str]:
    """What a page tells to type after `replearn`: in backquotes, or as a line of a shell block."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = [" ".join(found.split()) for found in re.findall(r"`(replearn [^`]+)`", text)]
    return [line.partition(" ")[2] for line in (*lines, *inline) if line.startswith("replearn ")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_have_the_flags_that_they_are_given(page: Path) -> None:
    pytest.importorskip("typer")
    from replearn.cli.app import UsageError, loaded

    for line in commands_on(page):
        name, *words = shlex.split(line, comments=True)
        if name.startswith("-"):
            continue
        command = loaded(name)
        if words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        required = [param.opts[0] for param in command.params if param.required]
        if not words and required:
            continue  # the command is spoken of: `replearn compress`
        try:
            command.make_context(name, words, resilient_parsing=not words).close()
        except UsageError as error:
            raise AssertionError(f"replearn {line}: {error.format_message()}") from error


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shell = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    commands = [line.partition("#")[0].strip() for block in shell for line in block.splitlines()]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()
    assert script[-1] == "make test"
    assert "make test" in commands
    assert "make demo" in commands
