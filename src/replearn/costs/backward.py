"""A backward pass without autograd's engine, which wants a real GPU for tensors that say they are on one.

Nodes are called one by one in the engine's own order (the latest made first). What the engine does between nodes
is done here: gradients are added up, and reduced to the shape that the next node expects.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .recorder import Recorder


def run_backward(loss: Tensor, recorder: Recorder) -> dict[Any, Tensor]:
    """Walk the graph of a loss; returns the gradients by accumulating node, so that they count as held."""
    with torch.no_grad(), _one_graph_task():
        return _walk(loss, recorder)


@contextmanager
def _one_graph_task() -> Iterator[None]:
    """Activation checkpointing asks the engine which pass it is in, and runs a block again once for each."""
    engine: Any = torch._C
    ask = engine._current_graph_task_id
    engine._current_graph_task_id = lambda: 1
    try:
        yield
    finally:
        engine._current_graph_task_id = ask


def _walk(loss: Tensor, recorder: Recorder) -> dict[Any, Tensor]:
    root = loss.grad_fn
    waiting = _dependencies(root)
    arrived: dict[Any, list[Tensor | None]] = {root: [torch.ones_like(loss)]}
    gradients: dict[Any, Tensor] = {}
    order = 0
    ready: list[tuple[int, int, Any]] = [(0, order, root)]
    while ready:
        node = heapq.heappop(ready)[2]
        given = arrived.pop(node, None)
        if type(node).__name__ == "AccumulateGrad":
            if given is not None and given[0] is not None:
                gradients[node] = given[0]
            continue
        made = _call(node, given, recorder)
        for (following, slot), gradient in zip(_edges(node), made, strict=True):
            if following is None:
                continue
            if gradient is not None:
                _arrive(arrived, following, slot, gradient)
            waiting[following] -= 1
            if not waiting[following]:
                order += 1
                heapq.heappush(ready, (-following._sequence_nr(), order, following))
        del made, given
    return gradients


def _dependencies(root: Any) -> dict[Any, int]:
    """How many nodes must run before each one."""
    counts: dict[Any, int] = {}
    seen, todo = {root}, [root]
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is None:
                continue
            counts[following] = counts.get(following, 0) + 1
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return counts


def _call(node: Any, given: list[Tensor | None] | None, recorder: Recorder) -> tuple[Tensor | None, ...]:
    """The gradients that a node gives along its edges; none if none came."""
    if given is None:
        return (None,) * len(_edges(node))
    recorder.enter_node(node)
    try:
        made = node.apply(*given) if _is_python(node) else node(*given)
    finally:
        recorder.leave_node()
    made = made if isinstance(made, tuple) else (made,)
    if _is_python(node):
        return tuple(gradient for gradient, needed in zip(made, node.needs_input_grad, strict=True) if needed)
    return made


def _edges(node: Any) -> list[tuple[Any, int]]:
    """Where a node's gradients go; a Python function has no edge for arguments that are no tensors."""
    edges = list(node.next_functions)
    return [edge for edge in edges if edge[0] is not None] if _is_python(node) else edges


def _is_python(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _arrive(arrived: dict[Any, list[Tensor | None]], node: Any, slot: int, gradient: Tensor) -> None:
    expected = node._input_metadata
    if node not in arrived:
        arrived[node] = [None] * len(expected)
    if gradient.shape != expected[slot].shape:
        gradient = gradient.sum_to_size(expected[slot].shape)
    if gradient.dtype != expected[slot].dtype:
        gradient = gradient.to(expected[slot].dtype)
    held = arrived[node][slot]
    arrived[node][slot] = gradient if held is None else held + gradient
