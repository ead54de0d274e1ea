"""Replay a model as CUDA graphs, one for each input signature."""

from __future__ import annotations

import enum
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
from ..verify import rebuilt, tensors_in
from .capture import Launch, Turns, capture, is_capturing_here

MAX_GRAPHS = 16  # kept of one model; they share a memory pool
PLAIN = (bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that capture CUDA graphs


class Replayed(nn.Module):
    """A model whose calls replay CUDA graphs, captured at the first call with an input signature.

    The signature is the pytree of shapes, strides and dtypes, the values of all other arguments, and the autocast
    state. Outputs are cloned, so later calls do not overwrite them. There are no gradients. The `MAX_GRAPHS` most
    recently used graphs are kept. Weights that are moved, cast or replaced are captured again; after other changes
    that the forward's Python code depends on, call `forget()`. Raises ReplearnError for a model that is not on a
    GPU, is in train mode, or can't be captured.

    >>> import torch
    >>> from replearn.fast.graphs.replay import Replayed
    >>> fast = Replayed(torch.nn.Linear(3, 2).eval())
    >>> fast.num_graphs
    0
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._begin()
        self.eval()

    def _begin(self) -> None:
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._pool: Any = None
        self._turns = Turns()  # graphs share buffers and memory
        self._lock = threading.RLock()

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop every graph; the next calls capture again."""
        with self._lock:
            for device in {graph.device for graph in self._graphs.values()}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # one may be running
            self._graphs.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing_here():  # the outer graph captures the model itself
            return self.model(*args, **kwargs)
        given: list[Tensor] = []
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key = (signature((args, kwargs), given, "takes"), autocast)
        with self._lock, torch.no_grad():
            found = self._graphs.get(key)
            if found is not None:
                self._graphs.move_to_end(key)
                made = self._run(found, given)
                # checked while the GPU works; what the graph reads is kept alive, so a stale replay is harmless
                if found.weights.are_those_of(self.model):
                    return made
            return self._run(self._capture(key, args, kwargs, given), given)

    def _run(self, graph: CapturedGraph, given: list[Tensor]) -> Any:
        self._turns.take(graph.device)
        return graph.run(given)

    def _capture(self, key: Hashable, args: Any, kwargs: Any, given: list[Tensor]) -> CapturedGraph:
        if not all(graph.weights.are_those_of(self.model) for graph in self._graphs.values()):
            self.forget()
        device = device_of(self.model, given)
        if self.num_graphs >= MAX_GRAPHS:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the oldest may be running
            self._graphs.popitem(last=False)
        if not self._graphs:
            self._pool = None  # torch does not reuse a pool without graphs
        if self._pool is None and device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._graphs[key] = capture_forward(self.model, args, kwargs, device, self._pool)
        except Exception:
            self._pool = None  # the pool of a failed capture is not reused
            raise
        return self._graphs[key]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Replayed:
        self.forget()  # frees the memory of the old weights
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs, which can't be copied or pickled; a copy captures its own."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {
            name: value for name, value in state.items() if name not in ("_graphs", "_pool", "_turns", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A graph with its static inputs and outputs."""

    device: torch.device
    inputs: list[Tensor]
    output: Any
    launch: Launch
    weights: Weights
    read: list[Tensor]  # keeps the memory that the graph reads alive

    def run(self, given: list[Tensor]) -> Any:
        for buffer, tensor in zip(self.inputs, given, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self.launch()
        return rebuilt(self.output, Tensor.clone)


def capture_forward(model: nn.Module, args: Any, kwargs: Any, device: torch.device, pool: Any) -> CapturedGraph:
    """Capture the forward pass on static copies of the inputs."""
    name = type(innermost(model)).__name__
    training = next((path or "it" for path, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ReplearnError(f"{name} can't be captured in train mode ({training}). Call .eval() first.")
    buffers: list[Tensor] = []

    def buffered(tensor: Tensor) -> Tensor:
        if tensor.device != device:
            raise ReplearnError(
                f"{name} is on {device} and got a tensor on {tensor.device}, whose values a graph would keep from "
                f"its capture. Move it first: tensor.to({str(device)!r})."
            )
        buffers.append(torch.empty_like(tensor, requires_grad=False).copy_(tensor))
        return buffers[-1]

    # inference tensors can't be written to outside of inference mode, and autocast's cache of casts would be freed
    # before the graph reads it
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
    return CapturedGraph(device, buffers, output, launch, Weights(model), read)


def signature(value: Any, tensors: list[Tensor], verb: str) -> Hashable:
    """A key that is equal for calls that can replay the same graph; tensors are appended to the list, in order."""
    cls = type(value)
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ReplearnError(f"A replayed model {verb} no tensors with the layout {value.layout}.")
        tensors.append(value)
        return cls, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return cls, *[signature(item, tensors, verb) for item in value]
    if isinstance(value, dict):
        return cls, *[(key, signature(item, tensors, verb)) for key, item in value.items()]
    if isinstance(value, float):
        return cls, value.hex()  # equal numbers alone: -0.0 is not 0.0, and NaN is itself
    if value is None or isinstance(value, PLAIN):
        return cls, value
    raise ReplearnError(
        f"A replayed model {verb} tensors, in tuples, lists and dicts, and plain values, not {cls.__name__}: a "
        "graph can't tell what is in it. Hand over its tensors, or leave it out (a Hugging Face model: "
        "use_cache=False)."
    )


class Weights:
    """The modules and tensors of a model at capture, to detect changes."""

    def __init__(self, model: nn.Module) -> None:
        self.model, modules = model, list(model.modules())
        self.places: list[dict[str, Any]] = [p for m in modules for p in (m._modules, m._parameters, m._buffers)]
        self.held = self.now()
        self.tensors = [held for held in self.held if isinstance(held, Tensor)]
        self.layouts = [layout_of(tensor) for tensor in self.tensors]
        self.modes = [vars(module) for module in modules]

    def now(self) -> list[Any]:
        return list(chain.from_iterable(place.values() for place in self.places))

    def are_those_of(self, model: nn.Module) -> bool:
        now = self.now()
        return (
            model is self.model
            and len(now) == len(self.held)
            and all(map(is_, now, self.held))
            and [layout_of(tensor) for tensor in self.tensors] == self.layouts
            and not any(mode["training"] for mode in self.modes)
        )


def layout_of(tensor: Tensor) -> Hashable:
    """Address and layout: another view of the same memory is another weight."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def device_of(model: nn.Module, given: list[Tensor]) -> torch.device:
    return next((t.device for t in chain(model.parameters(), model.buffers(), given)), torch.device("cpu"))


def innermost(model: nn.Module) -> nn.Module:
    """The user's model inside wrappers, for its name in messages."""
    while type(model).__module__.startswith("replearn.") and isinstance(
        inner := getattr(model, "model", None), nn.Module
    ):
        model = inner
    return model


def check_graph(model: nn.Module, graph: Any, compile: Any) -> None:
    """Raise if graph=True can't work, before anything is built."""
    if not isinstance(graph, bool):
        raise ReplearnError(f"graph={graph!r}: write True to replay CUDA graphs, or False.")
    if not graph:
        return
    if compile in WITH_GRAPHS:
        raise ReplearnError(
            f"compile={compile!r} replays CUDA graphs of its own, which can't be captured in another. Write "
            "graph=True with compile=True or 'max-autotune-no-cudagraphs', which launches as little and returns "
            "outputs that stay, or leave graph out."
        )
    device = device_of(model, [])
    if device.type != "cuda":
        raise ReplearnError(
            f"graph=True needs a model on a CUDA GPU, and this {type(model).__name__} is on {device}, where there "
            "are no graphs to replay. Move it first, as with model.to('cuda'), or leave graph out."
        )
