"""torch.fx traces of a module's forward: which submodules and functions it calls, in which order, on what.

A trace changes neither the module nor torch nor what other threads call.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..errors import class_and_line
from .recording import TensorProxy, forward_of, not_traceable_in_timm, recording_copy, wrapped_functions
from .running import PrivateRandom

# layers that are one function call or none: calling them as modules more than doubles the time
INLINED = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Flatten),
)


class ModuleTracer(fx.Tracer):
    """Traces one module's own code; submodules are calls, and only sequences are traced into.

    Arguments with a default are proxies too, as if they were given; with `left_out`, the code sees
    `left_out(default)` instead.
    """

    functions: tuple[Any, ...] = ()  # recorded as calls, besides those that fx records

    def __init__(self, left_out: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._left_out = left_out

    def trace(
        self, root: Any, concrete_args: Any = None, substitutes: Mapping[str, nn.Module] | None = None
    ) -> fx.Graph:
        """The graph of the module's forward, with `substitutes` in place of the submodules of these names."""
        self.root = recording_copy(root, self.record_read, self.record_call)
        self.root_module_name = type(root).__name__
        try:
            return self._traced(substitutes or {})
        finally:
            for module in self.root.modules():  # part of cycles, which would keep the model's tensors alive
                module._parameters.clear()
                module._buffers.clear()

    def _traced(self, substitutes: Mapping[str, nn.Module]) -> fx.Graph:
        for name, module in substitutes.items():
            owner, _, key = name.rpartition(".")
            substitute = recording_copy(module, self.record_read, self.record_call)
            self.root.get_submodule(owner)._modules[key] = substitute
        self.submodule_paths = {module: name for name, module in self.root.named_modules()}
        tensors = reversed((*self.root.named_parameters(), *self.root.named_buffers()))
        self._names = {id(tensor): name for name, tensor in tensors}
        self._proxies: dict[str, fx.Proxy] = {}
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
        """Change the recording copy before it is traced."""

    def record_read(self, tensor: Any) -> Any:
        """A proxy of a parameter or buffer of the root, the same one each time."""
        name = self._names.get(id(tensor))
        if name is None:
            return tensor
        if name not in self._proxies:
            self._proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self._proxies[name]

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
        node.meta["no_tensor"] = is_no_tensor(node)
        return fx.Proxy(node, self) if node.meta["no_tensor"] else TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        # the base class would take a tensor for a constant
        return a.node if type(a) is TensorProxy else super().create_arg(a)


class ModelTracer(ModuleTracer):
    """Traces a whole model down to torch's own layers, and through the simplest of these.

    Arguments that are not `given` keep their defaults, and the code takes the branch for them.
    """

    def __init__(self, given: Collection[str]) -> None:
        super().__init__(lambda default: default)
        self._given = given
        self._leaf_types, self.functions = not_traceable_in_timm()

    def is_optional(self, arg: Any) -> bool:
        return super().is_optional(arg) and arg.node.target not in self._given

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, self._leaf_types):
            return True
        of_torch = all(type(part).__module__.startswith(("torch.nn", "torch.ao.nn")) for part in m.modules())
        return of_torch and not isinstance(m, nn.Sequential) and type(m) not in INLINED


def is_no_tensor(node: fx.Node) -> bool:
    """True for a size, dtype or device of a tensor, and for what is computed from these alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.target is getattr:
        return node.args[1] in ("shape", "device", "dtype", "ndim")
    computed = node.op == "call_function" and getattr(node.target, "__module__", None) in ("_operator", "math")
    return computed and bool(node.all_input_nodes) and all(n.meta.get("no_tensor") for n in node.all_input_nodes)


def is_sequence(module: nn.Module) -> bool:
    """True for nn.Sequential and subclasses with its forward."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def is_container(module: nn.Module) -> bool:
    """True for a list or dict of modules, which has no forward."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def trace(
    module: nn.Module,
    left_out: Callable[[Any], Any] | None = None,
    substitutes: Mapping[str, nn.Module] | None = None,
) -> fx.Graph | str:
    """The graph of the module's forward, or the error in one line."""
    try:
        with PrivateRandom():
            return ModuleTracer(left_out).trace(module, substitutes=substitutes)
    except Exception as error:
        return class_and_line(error)
