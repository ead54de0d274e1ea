"""Score blocks by how little they change their input, on one calibration batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.hooks import RemovableHandle

from ..blocks.running import call, unchanged
from ..errors import ReplearnError


def block_similarity(model: nn.Module, blocks: Mapping[str, str], batch: Any) -> dict[str, float]:
    """Mean cosine similarity of each block's output to its input; high means redundant.

    `blocks` gives each block's name and that of its input argument. Runs the model once in eval mode
    without gradients and leaves no trace on it: modes, buffers, hooks and the random state are as before.
    A block that runs several times is scored by the mean, one that changes the shape by the worst score.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ReplearnError(
            f"similarity needs a model with values, and this {type(model).__name__} is on the meta device. "
            "Plan by interval or fraction, or on the model itself."
        )
    found: dict[str, list[float]] = {name: [] for name in blocks}
    with ExitStack() as traces:
        for name, argument in blocks.items():
            for handle in _score(model.get_submodule(name), argument, found[name]):
                traces.callback(handle.remove)
        traces.enter_context(unchanged(model))
        traces.enter_context(torch.no_grad())
        try:
            call(model, batch)
        except Exception as error:
            raise ReplearnError(
                f"{type(model).__name__} could not be run on the calibration batch ({type(error).__name__}: "
                f"{error}). Pass one batch as the model takes it: a tensor, a tuple of arguments, or a dict of "
                "keywords."
            ) from error
    silent = [name for name in blocks if not found[name]]
    if silent:
        raise ReplearnError(
            f"The calibration batch never reached {', '.join(silent)}. Pass a batch that runs every block, or "
            "plan without similarity."
        )
    scores = {name: sum(values) / len(values) for name, values in found.items()}
    for name, score in scores.items():
        if score != score:
            raise ReplearnError(f"The calibration batch gave NaN in {name}; check the batch and the weights.")
    return scores


def _score(block: nn.Module, argument: str, scores: list[float]) -> Iterator[RemovableHandle]:
    """Hang hooks on the block that note the score of every call."""
    pending: list[Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        # a copy, because a block may write its result into its input
        pending.append((args[0] if args else kwargs[argument]).clone())

    def after(module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        scores.append(_cosine(pending.pop(), made[0] if isinstance(made, (tuple, list)) else made))

    yield block.register_forward_pre_hook(before, with_kwargs=True)
    yield block.register_forward_hook(after, with_kwargs=True)


def _cosine(given: Tensor, made: Any) -> float:
    """The mean over the batch; -1, the worst there is, if the shape changes."""
    if not isinstance(made, Tensor) or made.shape != given.shape:
        return -1.0
    rows = max(1, len(given)) if given.dim() > 1 else 1
    return float(cosine_similarity(given.float().reshape(rows, -1), made.float().reshape(rows, -1), dim=1).mean())
