"""Record one training step, or one forward pass, on the fake GPU.

The backward pass runs without autograd's engine, which needs a real GPU for CUDA tensors. Nodes are called one by
one in the engine's order, the latest first, and gradients are accumulated in between.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..blocks.global_settings import plain_encoder_layers
from ..blocks.running import call
from ..errors import ReplearnError, class_and_line
from .fake import converted_copy, example_on_fake_gpu, fake_gpu, on_fake_gpu
from .recorder import Operation, Recorder, tensors_in

Loss = Callable[[Any], Tensor]


def run_step(model: nn.Module, example: Any, precision: str, loss: Loss | None) -> tuple[Recorder, int]:
    """One training step on the fake GPU; returns its recorder, and the bytes saved for the backward pass."""
    with fake_gpu(precision):
        copied = converted_copy(model, on_fake_gpu).train()
        batch = example_on_fake_gpu(example)
        recorder = Recorder(copied, batch)
        with recorder, recorder.watching(), recorder.saving(), torch.enable_grad():
            try:
                output = call(copied, batch)
                value = (loss or default_loss)(output)
            except ReplearnError:
                raise
            except Exception as error:
                raise ReplearnError(_cannot_run(copied, recorder, error)) from error
            if not isinstance(value, Tensor) or not value.requires_grad:
                raise ReplearnError(
                    f"The loss of {type(model).__name__} depends on no trainable parameter, so there is "
                    "nothing to train. Unfreeze some, or give loss=lambda output: ..."
                )
            torch.clear_autocast_cache()  # as leaving `with torch.autocast` does
            saved = recorder.saved_bytes((output, value))
            recorder.phase = "backward"
            del output
            with _one_graph_task():
                gradients = run_backward(value.sum(), recorder)
            del gradients, value
    return recorder, saved


def run_forward(model: nn.Module, example: Any, precision: str) -> list[Operation]:
    """One forward pass on the fake GPU in eval mode, or in train mode if the eval mode depends on values."""
    with plain_encoder_layers():
        for training in (False, True):
            with fake_gpu(precision):
                copied, batch = converted_copy(model, on_fake_gpu).train(training), example_on_fake_gpu(example)
                recorder = Recorder(copied, batch)
                with recorder, recorder.watching(), torch.no_grad():
                    try:
                        call(copied, batch)
                        break
                    except Exception as error:
                        if training:
                            raise ReplearnError(_cannot_run(copied, recorder, error)) from error
    return recorder.operations


def default_loss(output: Any) -> Tensor:
    """The loss in the output; else cross entropy over the classes; else the sum of all tensors in it."""
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
    return (
        f"{type(model).__name__} can't be run without values: {place} failed with {class_and_line(error)}. "
        "Either the example does not fit (give it as the model takes it: a tensor, a tuple of "
        "arguments or a dict of keywords), or the module asks for the value of a tensor (.item(), an if), which "
        "shapes alone can't answer."
    )


@contextmanager
def _one_graph_task() -> Iterator[None]:
    """Give activation checkpointing, which recomputes a block once for each backward pass, the id of one pass."""
    engine: Any = torch._C
    ask = engine._current_graph_task_id
    engine._current_graph_task_id = lambda: 1
    try:
        yield
    finally:
        engine._current_graph_task_id = ask


@torch.no_grad()
def run_backward(loss: Tensor, recorder: Recorder) -> dict[Any, Any]:
    """Walk the graph of a loss; returns the gradients by AccumulateGrad node, so that they stay allocated."""
    inputs: dict[Any, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
    for node in sorted(_nodes(loss.grad_fn), key=lambda node: -node._sequence_nr()):
        if node in inputs and type(node).__name__ != "AccumulateGrad":
            gradients = _call(node, inputs.pop(node), recorder)
            # a Python function has no edges for arguments other than tensors
            edges = [edge for edge in node.next_functions if edge[0] is not None or not _is_python(node)]
            for (following, slot), gradient in zip(edges, gradients, strict=True):
                if following is not None and gradient is not None:
                    _accumulate(inputs, following, slot, gradient)
            del gradients
    return inputs


def _nodes(root: Any) -> set[Any]:
    """Every node of the graph."""
    seen, todo = {root}, [root]
    while todo:
        new = {following for following, _ in todo.pop().next_functions if following is not None} - seen
        seen |= new
        todo += new
    return seen


def _call(node: Any, given: list[Tensor | None], recorder: Recorder) -> tuple[Tensor | None, ...]:
    """The gradients along a node's edges."""
    try:
        gradients = node.apply(*given) if _is_python(node) else node(*given)
    finally:
        recorder.leave_node()
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    if _is_python(node):
        return tuple(each for each, needed in zip(gradients, node.needs_input_grad, strict=True) if needed)
    return gradients


def _is_python(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _accumulate(inputs: dict[Any, list[Tensor | None]], node: Any, slot: int, gradient: Tensor) -> None:
    expected = node._input_metadata
    if node not in inputs:
        inputs[node] = [None] * len(expected)
    if gradient.shape != expected[slot].shape:
        gradient = gradient.sum_to_size(expected[slot].shape)
    if gradient.dtype != expected[slot].dtype:
        gradient = gradient.to(expected[slot].dtype)
    previous = inputs[node][slot]
    inputs[node][slot] = gradient if previous is None else previous + gradient
