"""Which submodules a module's forward calls, in which order and with what: read off a trace of its code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

# They take numbers and sizes, for which C++ would read a stand-in as the tensor that it says it is, and crash
MAKERS = tuple(
    getattr(torch, name)
    for name in (
        *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
        *("randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices"),
        "zeros",
    )
)


# layers whose call is one function of their weights, or nothing at all: a module call more than doubles its price
OPENED = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Flatten),
)


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
    """Traces one module's own code; submodules are calls, and only sequences are looked into.

    Arguments with a default are stand-ins too, as if they were given; `left_out` says what the code sees instead.
    """

    proxy_buffer_attributes = True  # a real tensor that is sliced by a stand-in would end the process

    def __init__(self, root: nn.Module, left_out: Callable[[Any], Any] | None = None) -> None:
        super().__init__(autowrap_functions=MAKERS)
        self._autowrap_search.append(torch)
        self._top, self._left_out = root, left_out

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        if self._left_out is not None:
            args = [self._left_out(arg.node.args[0]) if self.is_optional(arg) else arg for arg in args]
        return fn, args

    def is_optional(self, arg: Any) -> bool:
        return type(arg) is TensorProxy and arg.node.op == "placeholder" and bool(arg.node.args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m is not self._top and not is_sequence(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        node.meta["measure"] = is_measure(node)
        return fx.Proxy(node, self) if node.meta["measure"] else TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        # the base class would take a stand-in that passes for a tensor for a constant
        return a.node if type(a) is TensorProxy else super().create_arg(a)


class WholeForward(OneForward):
    """Traces a whole model down to torch's own layers, of which the simplest are looked into as well.

    Arguments that are not `given` are left out: the code takes the way that it takes without them.
    """

    def __init__(self, root: nn.Module, given: Collection[str]) -> None:
        super().__init__(root, lambda default: default)
        self._given = given
        # timm keeps a list of what must not be traced, with reasons; it is read where timm is in use
        library: Any = sys.modules.get("timm.layers")
        self._closed = tuple(library.get_notrace_modules()) if library else ()
        functions = library.get_notrace_functions() if library else ()
        self._autowrap_function_ids |= {id(function) for function in functions if callable(function)}

    def is_optional(self, arg: Any) -> bool:
        return super().is_optional(arg) and arg.node.target not in self._given

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, self._closed):
            return True
        own = all(type(part).__module__.startswith(("torch.nn", "torch.ao.nn")) for part in m.modules())
        return own and not isinstance(m, nn.Sequential) and type(m) not in OPENED


def is_measure(node: fx.Node) -> bool:
    """Is this no tensor, but a size, dtype or device of one, or a number made of such?"""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.target is getattr:
        return node.args[1] in ("shape", "device", "dtype", "ndim")
    made = node.op == "call_function" and getattr(node.target, "__module__", None) in ("_operator", "math")
    return made and bool(node.all_input_nodes) and all(n.meta.get("measure") for n in node.all_input_nodes)


def is_sequence(module: nn.Module) -> bool:
    """A Sequential or a class derived from it that runs its layers one after another, as Sequential does."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def runs_nothing(module: nn.Module) -> bool:
    """A list or a dict of modules, which only holds them."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def trace(module: nn.Module, left_out: Callable[[Any], Any] | None = None) -> fx.Graph | str:
    """The graph of the module's forward, or why it has none; the module is left as it was."""
    try:
        with left_alone(module), torch.random.fork_rng(devices=[]):
            return OneForward(module, left_out).trace(module)
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
