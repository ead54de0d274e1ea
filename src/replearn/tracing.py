"""Which submodules a module's forward calls, in which order and with what: read off a trace of its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn


class TensorProxy(fx.Proxy):
    """A stand-in that also answers isinstance(x, Tensor), so that such a branch is taken as in a real call."""

    _is_param = False  # what isinstance(x, Parameter) asks of a tensor

    @property
    def __class__(self) -> type:
        return Tensor

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("a stand-in keeps its class")


class OneForward(fx.Tracer):
    """Traces one module's own code; submodules are calls, and only sequences are looked into."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._top = root

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m is not self._top and not is_sequence(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        # the base class would take a stand-in that passes for a tensor for a constant
        return a.node if type(a) is TensorProxy else super().create_arg(a)


def is_sequence(module: nn.Module) -> bool:
    """A Sequential or a class derived from it that runs its layers one after another, as Sequential does."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def runs_nothing(module: nn.Module) -> bool:
    """A list or a dict of modules, which only holds them."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def trace(module: nn.Module) -> fx.Graph | str:
    """The graph of the module's forward, or why it has none; the module is left as it was."""
    try:
        with left_alone(module), torch.random.fork_rng(devices=[]):
            return OneForward(module).trace(module)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextmanager
def left_alone(module: nn.Module) -> Iterator[None]:
    """Take back whatever attributes the traced code sets: they would be stand-ins, not tensors."""
    before: list[tuple[nn.Module, dict[str, Any]]] = [
        (part, {name: value.copy() if isinstance(value, dict) else value for name, value in vars(part).items()})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes in before:
            for name, value in attributes.items():
                if isinstance(value, dict):
                    kept = part.__dict__.get(name)
                    if isinstance(kept, dict):
                        kept.clear()
                        kept.update(value)
                        attributes[name] = kept
            part.__dict__.clear()
            part.__dict__.update(attributes)
