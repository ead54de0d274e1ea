"""Runs on a CPU that go where a compiled run on a GPU would go, for what its notes say of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from replearn.experiments.training import run
from replearn.experiments.training.fit import fit
from replearn.experiments.training.recipe import Recipe, Variant, recipe_from_dict


def noting_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, **recipe: Any) -> Callable[..., str]:
    """A function that trains an epoch with some fields of the recipe changed, and gives the result's notes."""
    monkeypatch.setattr(run, "kernels_run_on", lambda device: True)
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)  # a compiled run without the wait
    variant = Variant(label="E2E", method="e2e")
    shared = {"table": "", "data": ("digits",), "epochs": 1, "batch_size": 1024, "precision": "bfloat16"}
    base = Recipe(name="tiny", variants=(variant,), compile=True, **{**shared, **recipe})
    assert getattr(recipe_from_dict(base.to_dict()), setting)

    def notes(name: str, **changes: Any) -> str:
        made = replace(base, **changes)
        spec = run.RunSpec(recipe=made, variant=variant, data="digits", seed=0, out=folder / name)
        (result,) = fit([spec], device="cpu")
        assert result.recipe[setting] is getattr(made, setting)
        return " ".join(result.notes)

    return notes
