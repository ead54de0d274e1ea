"""Whatever the documentation shows runs, checks itself, and names things that exist."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replearn
from replearn.operators._base import options

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

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
    unchecked = [line for line, block in python_blocks(page) if not has_check(block)]
    assert not unchecked, f"{name_of(page)}: the blocks at lines {unchecked} check nothing"


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is gone after it: other tests walk over all operators."""
    replearn.operators.available()
    monkeypatch.setattr(options, "_registry", dict(options._registry))


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("page", pages_with_code, ids=name_of)
def test_the_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # pages save checkpoints
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for _, block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("name", modules_with_doctests)
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.name)
def test_every_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shell = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    commands = [line.partition("#")[0].strip() for block in shell for line in block.splitlines()]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()
    assert script[-1] == "make test"
    assert "make test" in commands
    assert "make demo" in commands
