"""Which submodules a module's forward calls, in which order and with what: a trace of its code by torch.fx.

Nothing outside of the trace changes: neither the module, nor torch, nor what other threads call.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..errors import class_and_line
from .running import PrivateRandom
from .shadow import TensorProxy, forward_of, library_functions, library_modules, shadow_of, wrapped_functions

# layers whose call is one function of their weights, or nothing at all: a module call more than doubles its price
OPENED = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Flatten),
)


class OneForward(fx.Tracer):
    """Traces one module's own code; submodules are calls, and only sequences are looked into.

    Arguments with a default are proxies too, as if they were given; `left_out` says what the code sees instead.
    """

    functions: tuple[Any, ...] = ()  # recorded as calls, besides those that fx records

    def __init__(self, left_out: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._left_out = left_out

    def trace(
        self, root: Any, concrete_args: Any = None, instead: Mapping[str, nn.Module] | None = None
    ) -> fx.Graph:
        """The graph of the module's forward, with other modules `instead` of those of the given names."""
        self.root = shadow_of(root, self.record_read, self.record_call)
        self.root_module_name = type(root).__name__
        try:
            return self._traced(instead or {})
        finally:
            for module in self.root.modules():  # it lies in cycles, and would hold the model's tensors for a while
                module._parameters.clear()
                module._buffers.clear()

    def _traced(self, instead: Mapping[str, nn.Module]) -> fx.Graph:
        for name, module in instead.items():
            owner, _, key = name.rpartition(".")
            self.root.get_submodule(owner)._modules[key] = shadow_of(module, self.record_read, self.record_call)
        self.submodule_paths = {module: name for name, module in self.root.named_modules()}
        held = reversed((*self.root.named_parameters(), *self.root.named_buffers()))
        self._names = {id(tensor): name for name, tensor in held}
        self._reads: dict[str, fx.Proxy] = {}
        self.tensor_attrs = {
            value: f"{path}.{name}".lstrip(".")
            for path, module in self.root.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        self.prepare()
        self.graph = fx.Graph(tracer_cls=type(self))
        forward, args = self.create_args_for_root(forward_of(self.root), True)
        with wrapped_functions(self.root, self.functions):
            self.create_node("output", "output", (self.create_arg(forward(*args)),), {})
        return self.graph

    def prepare(self) -> None:
        """Change the shadow before it is traced."""

    def record_read(self, tensor: Any) -> Any:
        """A proxy of a parameter or buffer of the root, the same one each time."""
        name = self._names.get(id(tensor))
        if name is None:
            return tensor
        if name not in self._reads:
            self._reads[name] = self.create_proxy("get_attr", name, (), {})
        return self._reads[name]

    def record_call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_module(module, module._call_impl, args, kwargs)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        if self._left_out is not None:
            args = [self._left_out(arg.node.args[0]) if self.is_optional(arg) else arg for arg in args]
        return fn, args

    def is_optional(self, arg: Any) -> bool:
        return isinstance(arg, TensorProxy) and arg.node.op == "placeholder" and bool(arg.node.args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m is not self.root and not is_sequence(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        node.meta["measure"] = is_measure(node)
        return fx.Proxy(node, self) if node.meta["measure"] else TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        # the base class would take it for a constant
        return a.node if type(a) is TensorProxy else super().create_arg(a)


class WholeForward(OneForward):
    """Traces a whole model down to torch's own layers, of which the simplest are looked into as well.

    Arguments that are not `given` are left out: the code takes the way that it takes without them.
    """

    def __init__(self, given: Collection[str]) -> None:
        super().__init__(lambda default: default)
        self._given, self._closed, self.functions = given, library_modules(), library_functions()

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


def trace(
    module: nn.Module,
    left_out: Callable[[Any], Any] | None = None,
    instead: Mapping[str, nn.Module] | None = None,
) -> fx.Graph | str:
    """The graph of the module's forward, or why it has none."""
    try:
        with PrivateRandom():
            return OneForward(left_out).trace(module, instead=instead)
    except Exception as error:
        return class_and_line(error)
