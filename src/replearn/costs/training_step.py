"""One training step on the fake GPU, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..blocks.running import call
from ..errors import ReplearnError
from .backward import run_backward
from .fake import double_of, example_on_fake_gpu, fake_gpu, on_fake_gpu
from .operations import tensors_in
from .recorder import Recorder

Loss = Callable[[Any], Tensor]


def run_step(
    model: nn.Module,
    example: Any,
    kinds: Iterable[str],
    operators: Iterable[str],
    precision: str,
    loss: Loss | None,
) -> tuple[Recorder, dict[str, int]]:
    """One training step on the fake GPU, forward and backward."""
    with fake_gpu(precision):
        double = double_of(model, on_fake_gpu).train()
        batch = example_on_fake_gpu(example)
        recorder = Recorder(double, tuple(kinds), tuple(operators))
        recorder.mark_batch(batch)
        with recorder, recorder.watching(), recorder.saving(), torch.enable_grad():
            try:
                made = call(double, batch)
                value = (loss or default_loss)(made)
            except ReplearnError:
                raise
            except Exception as error:
                raise ReplearnError(_cannot_run(double, recorder, error)) from error
            if not isinstance(value, Tensor) or not value.requires_grad:
                raise ReplearnError(
                    f"The loss of {type(model).__name__} depends on no trainable parameter, so there is "
                    "nothing to train. Unfreeze some, or give loss=lambda output: ..."
                )
            torch.clear_autocast_cache()  # as leaving `with torch.autocast` does
            saved = recorder.saved_bytes((made, value))
            recorder.phase = "backward"
            del made
            gradients = run_backward(value.sum(), recorder)
            del gradients, value
    return recorder, saved


def default_loss(output: Any) -> Tensor:
    """The output's own loss; else cross entropy over the classes; else the sum of what it holds."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.dim() >= 2 and logits.is_floating_point():
        # tokens have their classes last, images and maps have them second
        rows = logits.reshape(-1, logits.shape[-1]) if logits.dim() == 3 else logits
        shape = (rows.shape[0], *rows.shape[2:])
        return cross_entropy(rows, torch.empty(shape, dtype=torch.long, device=rows.device))
    floating = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not floating:
        raise ReplearnError(
            f"The model gives {type(output).__name__} without a number to train on: give loss=lambda output: ..."
        )
    return torch.stack([tensor.sum().float() for tensor in floating]).sum()


def _cannot_run(model: nn.Module, recorder: Recorder, error: Exception) -> str:
    path = recorder.path[-1] if recorder.path else ""
    inside = type(model.get_submodule(path)).__name__
    place = f"{path} ({inside})" if path else inside
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return (
        f"{type(model).__name__} can't be run without values: {place} failed with {type(error).__name__}: "
        f"{reason}. Either the example does not fit (give it as the model takes it: a tensor, a tuple of "
        "arguments or a dict of keywords), or the module asks for the value of a tensor (.item(), an if), which "
        "shapes alone can't answer."
    )
