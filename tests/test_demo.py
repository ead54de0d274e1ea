"""What `make demo` says: the numbers of its table, whatever they are."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "demo", sys)  # dataclasses look their module up by name
    return runpy.run_path(str(DEMO), run_name="demo")


def made(demo: Any, fitted: float) -> dict[str, Any]:
    rows = {"end to end": demo["Row"]("end to end", 0, [98.0, 99.0], [100, 100], [1.0, 1.0])}
    for out in (3, 6):
        for way, accuracy in zip(demo["FORMS"], (30.0, 90.0, fitted), strict=True):
            rows[f"{way} {out}"] = demo["Row"](way, out, [accuracy] * 2, [60, 60], [0.5, 0.6])
    return rows


def test_the_advice_names_the_way_that_kept_most(demo: Any) -> None:
    assert demo["advice"](made(demo, 95.0)) == (
        "Without 6 of its 12 blocks, the network trained to 98.50 % has 95.00 % by compress: fitted, "
        "and 30.00 % by bare removal."
    )
    assert "has 90.00 % by compress: realigned removal" in demo["advice"](made(demo, 80.0))


def test_the_table_and_the_picture_have_every_way(demo: Any, tmp_path: Path) -> None:
    rows = list(made(demo, 95.0).values())
    lines = demo["table"](rows).splitlines()
    assert lines[1].split() == ["end", "to", "end", "0", "of", "12", "98.50", "±", "0.71", "100", "1.00"]
    assert [line.split("  ")[0] for line in lines[1:8]] == [row.way for row in rows]
    demo["draw"](rows, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_the_latency_is_time_that_the_thread_ran(demo: Any) -> None:
    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)  # as if the machine were busy with other work
            return work(x)

    class Works(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return work(x)

    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = x @ x
        return x

    torch.set_num_threads(1)
    shares = demo["latencies"]({"works": Works(), "waits": Waits()}, torch.eye(128), rounds=10)
    assert shares["works"] == 1
    assert shares["waits"] < 3  # by the clock on the wall it is more than ten times as long
