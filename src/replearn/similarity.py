"""Score blocks by how little they change their input, on one calibration batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from .anatomy import Anatomy
from .errors import ReplearnError


def block_similarity(model: nn.Module, blocks: Mapping[str, Anatomy], batch: Any) -> dict[str, float]:
    """Mean cosine similarity of each block's output to its input; high means redundant.

    Runs the model once in eval mode without gradients and leaves no trace on it: modes, buffers
    and the random state are as before.
    """
    scores: dict[str, float] = {}

    def score(name: str, given: Tensor, made: Any) -> None:
        made = made[0] if isinstance(made, tuple) else made
        if not isinstance(made, Tensor) or made.shape != given.shape:
            scores[name] = float("-inf")  # changes the shape: never a target
            return
        flat = cosine_similarity(given.flatten(1).float(), made.flatten(1).float(), dim=1)
        scores[name] = float(flat.mean())

    handles = []
    for name, anatomy in blocks.items():

        def hook(
            module: nn.Module, args: Any, kwargs: Any, made: Any, name: str = name, key: str = anatomy.input
        ) -> None:
            score(name, args[0] if args else kwargs[key], made)

        handles.append(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
    try:
        with unchanged(model), torch.no_grad():
            call(model, batch)
    except ReplearnError:
        raise
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} could not be run on the calibration batch ({type(error).__name__}: {error}). "
            "Pass one batch as the model takes it: a tensor, a tuple of arguments, or a dict of keywords."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name in blocks if name not in scores]
    if silent:
        raise ReplearnError(f"The calibration batch never reached these blocks: {', '.join(silent)}.")
    bad = [name for name, value in scores.items() if value != value]
    if bad:
        raise ReplearnError(f"The calibration batch gave NaN in {bad[0]}; check the batch and the weights.")
    return scores


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch as users write it: tensor, tuple of arguments, dict of keywords."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module's mode and the random state are as before."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
