"""A module's code without its parameters, to be run with synthesized ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name)


def without_hooks(module: nn.Module) -> nn.Module:
    """Take every hook off a module that is a copy of a user's one."""
    for layer in module.modules():
        for hooks in _HOOKS:
            if hooks in layer.__dict__:
                layer.__dict__[hooks] = OrderedDict()
    return module


def parameter_names(module: nn.Module) -> list[str]:
    """Every place of a module that holds a parameter; one inside a shared submodule by its first name only."""
    return [
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None
    ]


def shell_of(
    module: nn.Module, fill: Mapping[str, Tensor] | None = None, device: torch.device | None = None
) -> nn.Module:
    """Copy a module's code and settings, with own buffers, without hooks and without parameters.

    Settings (a Hugging Face config, say) are shared with the original, not copied. Where `fill`
    gives tensors by name, they become the copy's parameters.
    """
    fill = fill or {}
    copies: dict[int, nn.Module] = {}

    def copy(original: nn.Module, prefix: str) -> nn.Module:
        if id(original) in copies:
            return copies[id(original)]
        shell = original.__class__.__new__(original.__class__)
        copies[id(original)] = shell
        shell.__dict__ = original.__dict__.copy()
        shell.__dict__["_parameters"] = {
            name: nn.Parameter(fill[prefix + name]) if prefix + name in fill else None
            for name in original._parameters
        }
        shell.__dict__["_buffers"] = {
            name: None if buffer is None else buffer.detach().to(device or buffer.device, copy=True)
            for name, buffer in original._buffers.items()
        }
        shell.__dict__["_modules"] = {
            name: None if child is None else copy(child, f"{prefix}{name}.")
            for name, child in original._modules.items()
        }
        return shell

    made = copy(module, "")
    for shell in copies.values():
        vars(shell).update({name: _own(value, copies) for name, value in vars(shell).items()})
    return without_hooks(made)


def _own(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """An attribute that points at the original (`self.run = self.run_fast`), turned to the copy."""
    if isinstance(value, MethodType) and id(value.__self__) in copies:
        return MethodType(value.__func__, copies[id(value.__self__)])
    return copies.get(id(value), value)
