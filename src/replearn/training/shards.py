"""The state of a sharded run: a folder that every process writes its part of.

It is torch.distributed.checkpoint's own format, so that any number of processes can read it back,
one included. The folder is swapped in whole, by renaming.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import ReplearnError

FORMAT = "replearn-shards-1"


def write_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]
) -> None:
    """Write every process's part; call it in all of them."""
    fresh = folder.with_name(f".{folder.name}.new")
    leads = dist.get_rank() == 0
    if leads:
        shutil.rmtree(fresh, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    try:
        save({"model": weights, "optimizer": moments}, checkpoint_id=str(fresh))
    except (OSError, CheckpointException) as error:
        raise ReplearnError(
            f"Can't write the checkpoint {folder}: {error}. The one before it is untouched."
        ) from error
    if leads:
        (fresh / "about.json").write_text(json.dumps({"format": FORMAT, **about}), encoding="utf-8")
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def read_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill the model and the optimizer from a folder, on any number of processes; what was said about it."""
    try:
        about: dict[str, Any] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about.pop("format", None) != FORMAT:
            raise ReplearnError(f"{folder} is not a sharded checkpoint of this version ({FORMAT}).")
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        load(state, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
    except (OSError, ValueError, CheckpointException) as error:
        if isinstance(error, ReplearnError):
            raise
        raise ReplearnError(f"The checkpoint {folder} can't be read: {error}. Delete it to start anew.") from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return about
