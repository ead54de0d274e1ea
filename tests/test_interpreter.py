"""Every test marked `runs_kernels`, in one process where Triton interprets kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreting import HERE, INTERPRETED


@pytest.mark.skipif(HERE == "cuda" or INTERPRETED, reason="the kernels run anyway")
def test_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    tests = Path(__file__).parent
    files = [str(file) for file in sorted(tests.glob("test_*.py")) if "@runs_kernels" in file.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreter", *files]
    changes = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # loading plugins takes two seconds
    done = subprocess.run(command, cwd=tests.parent, env=os.environ | changes, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout
