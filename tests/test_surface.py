"""What a user sees of the package, and what importing it costs: few names, nothing that is not needed yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import replearn
from replearn.cli.app import COMMANDS, summary_of

PACKAGE = Path(replearn.__file__).parent


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running some code."""
    told = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('MODULES', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(told.stdout.rpartition("MODULES")[2].split())


def test_the_root_offers_few_names_and_shows_no_internals() -> None:
    assert len(replearn.__all__) <= 15
    assert set(dir(replearn)) == {*replearn.__all__, "__version__"}
    for name in replearn.__all__:
        assert getattr(replearn, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        replearn.no_such_name  # noqa: B018


def test_the_root_folder_has_one_entry_for_each_layer() -> None:
    entries = {entry.name for entry in PACKAGE.iterdir() if entry.name != "__pycache__"}
    assert len(entries) <= 17


@pytest.mark.parametrize("line", ["--version", "--help", "plan --help", "bench steps --help"])
def test_help_and_version_load_no_torch(line: str) -> None:
    code = (
        f"import sys; sys.argv = ['replearn', *{line.split()!r}]\n"
        "from replearn.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code"
    )
    assert "torch" not in loaded_after(code)


def test_every_command_says_in_one_line_what_it_does() -> None:
    names = [file.stem for file in COMMANDS.glob("[a-z]*.py")]
    assert {"plan", "train", "compare", "bench"} <= set(names)
    assert all(summary_of(name).endswith(".") for name in names)
