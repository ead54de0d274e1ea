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
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import ReplearnError
from ...planning.serialization import parse
from .results import write_atomically
from .shard_reading import SafePlanner, SafeReader, read_index

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
        write_atomically(fresh / "about.json", json.dumps({"format": FORMAT, **about}))
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def recover_shards(folder: Path) -> None:
    """Give a state its name back if the process was killed between two renamings; call it in one process."""
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    if not folder.exists():
        whole = fresh if (fresh / "about.json").exists() else old  # about.json is written last
        if whole.exists():
            os.rename(whole, folder)
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def read_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill the model and the optimizer from a folder, on any number of processes; what was said about it."""
    try:
        about: Any = parse((folder / "about.json").read_bytes(), "about.json")
        if not isinstance(about, dict) or about.pop("format", None) != FORMAT:
            raise ReplearnError(f"it is not a sharded checkpoint of this version ({FORMAT})")
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        idle = idle_parameters(read_index(folder / ".metadata"), model)
        # a parameter that had no gradient yet has no state in the optimizer, in the file or here
        planner = SafePlanner(allow_partial_load=bool(idle))
        load(state, storage_reader=SafeReader(folder), planner=planner, no_dist=not dist.is_initialized())
    except (OSError, ValueError, CheckpointException) as error:
        raise ReplearnError(f"The checkpoint {folder} can't be read: {error}. Delete it to start anew.") from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for parameter in idle:
        optimizer.state.pop(parameter, None)
    return about


def idle_parameters(index: Metadata, model: nn.Module) -> list[nn.Parameter]:
    """Parameters that the file has weights for and no optimizer state; ReplearnError if weights are missing."""
    names = list(index.state_dict_metadata)
    if missing := sorted({f"model.{name}" for name in model.state_dict()} - set(names)):
        raise ReplearnError(f"it lacks {len(missing)} of the model's tensors ({', '.join(missing[:3])})")
    held = {
        name.removeprefix("optimizer.state.").rpartition(".")[0] for name in names if name.startswith("optimizer.")
    }
    return [parameter for name, parameter in model.named_parameters() if name not in held]
