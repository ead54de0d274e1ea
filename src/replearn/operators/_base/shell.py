"""A module's code without its parameters, to be run with synthesized ones."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...blocks.shallow_copy import shallow_copy

_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name)


def without_hooks(module: nn.Module) -> nn.Module:
    """Remove every hook from a copy of a user's module, in place."""
    for layer in module.modules():
        for hooks in _HOOKS:
            if hooks in layer.__dict__:
                layer.__dict__[hooks] = OrderedDict()
    return module


def parameter_names(module: nn.Module) -> list[str]:
    """The names of all parameters, tied ones under each name; shared submodules are listed once."""
    return [
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None
    ]


def shell_of(
    module: nn.Module, fill: Mapping[str, Tensor] | None = None, device: torch.device | None = None
) -> nn.Module:
    """A copy of a module with buffers of its own, without hooks, and without parameters except those in `fill`.

    Settings, as a Hugging Face config, are shared with the original.
    """
    shell = shallow_copy(module)
    for path, layer in shell.named_modules():
        prefix = f"{path}." if path else ""
        vars(layer)["_parameters"] = {
            name: nn.Parameter(fill[prefix + name]) if fill and prefix + name in fill else None
            for name in layer._parameters
        }
        vars(layer)["_buffers"] = {
            name: None if buffer is None else buffer.detach().to(device or buffer.device, copy=True)
            for name, buffer in layer._buffers.items()
        }
    return without_hooks(shell)


def call_with(parameters: Mapping[str, Tensor], module: nn.Module, args: Any, kwargs: Any = None) -> Any:
    """Call a shallow copy of the module with these parameters, so that other threads may use the module meanwhile.

    Buffers and attributes that the forward assigns are copied back to the module.
    """
    if torch.compiler.is_compiling():
        return functional_call(module, dict(parameters), args, kwargs)
    copied = shallow_copy(module)
    for name, tensor in parameters.items():
        path, _, key = name.rpartition(".")
        copied.get_submodule(path)._parameters[key] = tensor  # type: ignore[assignment]
    before = [(dict(vars(layer)), dict(layer._buffers)) for layer in copied.modules()]
    result = copied(*args, **(kwargs or {}))
    for layer, ran, (state, buffers) in zip(module.modules(), copied.modules(), before, strict=True):
        layer._buffers.update(
            {name: value for name, value in ran._buffers.items() if value is not buffers.get(name)}
        )
        vars(layer).update({name: value for name, value in vars(ran).items() if value is not state.get(name)})
    return result
