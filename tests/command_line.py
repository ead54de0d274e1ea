"""The command line, called in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from replearn.cli.app import app


def call(*words: str, code: int = 0) -> Result:
    """What a command leaves; it ends with this exit code."""
    result = CliRunner().invoke(app, list(words), prog_name="replearn")
    assert result.exit_code == code, result.output + result.stderr
    return result


def shown(*words: str, code: int = 0) -> str:
    """What a command prints; of one that fails, its error."""
    result = call(*words, code=code)
    return result.stderr if code else result.output
