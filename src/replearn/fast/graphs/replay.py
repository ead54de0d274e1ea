"""Replay a model as CUDA graphs: one launch instead of hundreds, for each kind of input that it gets."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from ..verify import tensors_in
from .capture import Launch, Turns, capture, is_capturing_here
from .signature import rebuilt, signature

MOST = 16  # graphs kept of one model; each holds its inputs and outputs, and they share the memory in between
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that replay graphs of their own


class Replayed(nn.Module):
    """A model whose calls replay CUDA graphs, recorded at the first call with inputs of that kind.

    A kind is given by shapes, strides and dtypes, whatever they are nested in, by equal other arguments, and by
    the autocast around the call. Outputs are the caller's: the next call does not overwrite them. There are no
    gradients. `most` kinds are kept, and the one not used for longest is forgotten. Weights that are moved, cast
    or exchanged are noticed, as is train mode; after other changes of what the forward decides in Python, call
    `forget()`. Raises ReplearnError where the model is not on a GPU or can't be recorded.

    >>> import torch
    >>> from replearn.fast.graphs.replay import Replayed
    >>> fast = Replayed(torch.nn.Linear(3, 2).eval())
    >>> fast.num_graphs
    0
    """

    def __init__(self, model: nn.Module, most: int = MOST) -> None:
        super().__init__()
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ReplearnError(f"most={most!r}: write how many graphs to keep, a whole number from 1 on.")
        self.model, self.most = model, most
        self._begin()
        self.eval()

    def _begin(self) -> None:
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._pool: Any = None
        self._turns = Turns()  # graphs share buffers and memory
        self._lock = threading.RLock()

    @property
    def num_graphs(self) -> int:
        """How many kinds of input are recorded."""
        return len(self._recordings)

    def forget(self) -> None:
        """Drop every graph; the next calls capture again."""
        with self._lock:
            for device in {recording.device for recording in self._recordings.values()}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # one may be running
            self._recordings.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing_here():  # somebody else's graph takes up the model itself
            return self.model(*args, **kwargs)
        given: list[Tensor] = []
        key = (signature((args, kwargs), given, "takes"), around())
        with self._lock, torch.no_grad():
            found = self._recordings.get(key)
            if found is not None:
                self._recordings.move_to_end(key)
                made = self._run(found, given)
                # looked up while the GPU works; what it reads is held, so a replay in vain does no harm
                if found.weights.are_those_of(self.model):
                    return made
            return self._run(self._record(key, args, kwargs, given), given)

    def _run(self, recording: Recording, given: list[Tensor]) -> Any:
        self._turns.take(recording.device)
        return recording.run(given)

    def _record(self, key: Hashable, args: Any, kwargs: Any, given: list[Tensor]) -> Recording:
        if not all(recording.weights.are_those_of(self.model) for recording in self._recordings.values()):
            self.forget()
        device = device_of(self.model, given)
        if self.num_graphs >= self.most:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the oldest may be running
            self._recordings.popitem(last=False)
        if not self._recordings:
            self._pool = None  # torch takes no pool again that no graph is left of
        if self._pool is None and device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._recordings[key] = record(self.model, args, kwargs, device, self._pool)
        except Exception:
            self._pool = None  # that of a failed recording is not used again
            raise
        return self._recordings[key]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Replayed:
        self.forget()  # at once, so that the memory of the old weights is free
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs, which can't be copied or stored; a copy records its own."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {
            name: value for name, value in state.items() if name not in ("_recordings", "_pool", "_turns", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()


@dataclass(frozen=True, eq=False)
class Recording:
    """One graph with the tensors that it reads from and writes to."""

    device: torch.device
    inputs: list[Tensor]
    output: Any
    launch: Launch
    weights: Weights
    read: list[Tensor]  # so that the memory stays where the graph reads it

    def run(self, given: list[Tensor]) -> Any:
        for buffer, tensor in zip(self.inputs, given, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self.launch()
        return rebuilt(self.output, Tensor.clone)


def record(model: nn.Module, args: Any, kwargs: Any, device: torch.device, pool: Any) -> Recording:
    """Buffers like the inputs, and the forward pass on them recorded."""
    name = type(innermost(model)).__name__
    training = next((path or "it" for path, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ReplearnError(f"{name} can't be recorded in train mode ({training}). Call .eval() first.")
    buffers: list[Tensor] = []

    def buffered(tensor: Tensor) -> Tensor:
        if tensor.device != device:
            raise ReplearnError(
                f"{name} is on {device} and got a tensor on {tensor.device}, whose values a graph would keep from "
                f"its recording. Move it first: tensor.to({str(device)!r})."
            )
        buffers.append(torch.empty_like(tensor, requires_grad=False).copy_(tensor))
        return buffers[-1]

    # inference tensors could not be written to outside of inference mode, and the casts that an autocast keeps for
    # later calls would be gone when the graph reads them
    numbers = torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    )
    with torch.inference_mode(False), torch.no_grad(), numbers:
        own_args, own_kwargs = rebuilt((args, kwargs), buffered)
        launch, output = capture(name, lambda: model(*own_args, **own_kwargs), device, pool)
    signature(output, [], "returns")
    read = [tensor.detach() for module in model.modules() for tensor in tensors_in(vars(module))]
    return Recording(device, buffers, output, launch, Weights(model), read)


class Weights:
    """Where a model's modules and tensors were, to see whether they still are."""

    def __init__(self, model: nn.Module) -> None:
        self.model, modules = model, list(model.modules())
        self.places: list[dict[str, Any]] = [p for m in modules for p in (m._modules, m._parameters, m._buffers)]
        self.held = self.now()
        self.tensors = [held for held in self.held if isinstance(held, Tensor)]
        self.looks = [look_of(tensor) for tensor in self.tensors]
        self.modes = [vars(module) for module in modules]

    def now(self) -> list[Any]:
        return list(chain.from_iterable(place.values() for place in self.places))

    def are_those_of(self, model: nn.Module) -> bool:
        now = self.now()
        return (
            model is self.model
            and len(now) == len(self.held)
            and all(map(is_, now, self.held))
            and [look_of(tensor) for tensor in self.tensors] == self.looks
            and not any(mode["training"] for mode in self.modes)
        )


def look_of(tensor: Tensor) -> Hashable:
    """Where its numbers lie, and how: another view of the same memory is another weight."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def around() -> Hashable:
    """The autocast that a call is in."""
    return torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")


def device_of(model: nn.Module, given: list[Tensor]) -> torch.device:
    return next((t.device for t in chain(model.parameters(), model.buffers(), given)), torch.device("cpu"))


def innermost(model: nn.Module) -> nn.Module:
    """The model itself, for its name in messages."""
    while type(model).__module__.startswith("replearn.") and isinstance(
        inner := getattr(model, "model", None), nn.Module
    ):
        model = inner
    return model


def check_graph(model: nn.Module, graph: Any, compile: Any) -> None:
    """Refuse graph=True where it can't work, before anything is built."""
    if not isinstance(graph, bool):
        raise ReplearnError(f"graph={graph!r}: write True to replay CUDA graphs, or False.")
    if not graph:
        return
    if compile in WITH_GRAPHS:
        raise ReplearnError(
            f"compile={compile!r} replays CUDA graphs of its own, which can't be recorded in another. Write "
            "graph=True with compile=True or 'max-autotune-no-cudagraphs', which launches as little and returns "
            "outputs that stay, or leave graph out."
        )
    device = device_of(model, [])
    if device.type != "cuda":
        raise ReplearnError(
            f"graph=True needs a model on a CUDA GPU, and this {type(model).__name__} is on {device}, where there "
            "are no graphs to replay. Move it first, as with model.to('cuda'), or leave graph out."
        )
