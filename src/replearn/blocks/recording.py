"""Copies of a model that record the calls of their modules and the tensors that their code reads.

torch.fx's own Tracer patches `nn.Module.__call__` and `__getattr__` for the whole process: modules that other
threads call fail, and two traces at once leave the patches behind. Here only the copy records, and what the traced
code assigns stays on the copy.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.fx import _symbolic_trace as torch_fx

from .shallow_copy import shallow_copy

_wrapping = threading.RLock()


class RecordedDict(dict[str, Any]):
    """A module's parameters, buffers or submodules; each lookup returns what `record` makes of the entry."""

    def __init__(self, entries: Any, record: Callable[[Any], Any]) -> None:
        super().__init__(entries)
        self._record = record

    def __getitem__(self, name: str) -> Any:
        return self._record(super().__getitem__(name))


def recording_copy(root: nn.Module, read: Callable[[Any], Any], call: Callable[..., Any]) -> nn.Module:
    """A copy whose code gets `read(tensor)` for a parameter or buffer, and `call(module, ...)` for a call."""
    copied = shallow_copy(root, copy_containers=True)
    for module in copied.modules():
        state = vars(module)
        state |= {name: RecordedDict(state[name], read) for name in ("_parameters", "_buffers")}
        state["_compiled_call_impl"] = functools.partial(call, module)  # what nn.Module.__call__ runs first
    return copied


def forward_of(root: nn.Module) -> FunctionType:
    """The function that a call of the module runs."""
    forward = vars(root).get("forward", type(root).forward)
    function = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is root else forward
    if not isinstance(function, FunctionType):
        raise TypeError(f"its forward is a {type(function).__name__}")
    return function


# these take numbers and sizes, and raise for a proxy of one
FACTORIES = tuple(
    getattr(torch, name)
    for name in (
        *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
        *("randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices"),
        "zeros",
    )
)


def functions_to_wrap(root: nn.Module, more: Collection[Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Functions that a trace records as one call, each with a namespace and the name that it has there.

    They are those of `math`, torch's factories, those given to torch.fx.wrap, and `more`.
    """
    wanted = {id(value) for name, value in vars(math).items() if callable(value) and not name.startswith("_")}
    wanted |= {id(function) for function in (*FACTORIES, *more)}
    spaces: dict[int, dict[str, Any]] = {id(vars(space)): vars(space) for space in (math, torch)}
    for kind in {type(module) for module in root.modules()}:
        space = getattr(inspect.unwrap(kind.forward), "__globals__", {})
        spaces[id(space)] = space
    for space in spaces.values():
        for name, value in list(space.items()):
            if not name.startswith("_") and id(value) in wanted:
                yield space, name, value
    for (_, name), space in list(torch_fx._wrapped_fns_to_patch.items()):
        if name in space:
            yield space, name, space[name]


@contextmanager
def wrapped_functions(root: nn.Module, more: Collection[Any] = ()) -> Iterator[None]:
    """Record this thread's calls of such functions with proxies; one thread at a time.

    Other threads call the same wrappers, which only pass the call on.
    """
    thread = threading.get_ident()
    with _wrapping:
        wrapped = [(space, name, function) for space, name, function in functions_to_wrap(root, more)]
        try:
            for space, name, function in wrapped:
                space[name] = _recording(function, thread)
            yield
        finally:
            for space, name, function in reversed(wrapped):
                space[name] = function


def _recording(function: Any, thread: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            proxy = torch_fx._find_proxy(args, kwargs)
            if proxy is not None:
                return proxy.tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call


def not_traceable_in_timm() -> tuple[tuple[type, ...], tuple[Any, ...]]:
    """The classes and the functions that timm registers as not traceable, if timm is imported."""
    library: Any = sys.modules.get("timm.layers")
    if library is None:
        return (), ()
    return tuple(library.get_notrace_modules()), tuple(filter(callable, library.get_notrace_functions()))


class TensorProxy(fx.Proxy, torch.Tensor):  # type: ignore[misc]
    """A proxy that is a tensor subclass as well, so that `isinstance(x, Tensor)` is true.

    torch's C++ functions call `__torch_function__` of a real subclass; an object that only claims to be a tensor
    would crash them. The tensor itself is on the meta device.
    """

    _is_param = False  # what isinstance(x, Parameter) asks of a tensor

    def __new__(cls, node: fx.Node, tracer: fx.Tracer) -> TensorProxy:
        return torch.Tensor._make_subclass(cls, torch.empty(2, device="meta"))

    def __init__(self, node: fx.Node, tracer: fx.Tracer) -> None:
        fx.Proxy.__init__(self, node, tracer)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return fx.Proxy.__getattr__(self, name)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return fx.Proxy.__torch_function__(*args, **kwargs)


_OWN = {*dir(fx.Proxy), "node", "tracer", "_is_param", "__torch_function__", "__torch_dispatch__"}


def _not_traced(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any) -> Any:
        if name.startswith("__i") and name not in ("__int__", "__index__"):
            return NotImplemented  # x += y becomes x = x + y, as with any proxy
        raise fx.proxy.TraceError(f"{name} needs the values of a traced tensor")

    return refuse


for _name in set(dir(torch.Tensor)) - set(dir(fx.Proxy)):
    if _name.startswith("__") and _name != "__torch_dispatch__" and callable(getattr(torch.Tensor, _name)):
        setattr(TensorProxy, _name, _not_traced(_name))
        _OWN.add(_name)
