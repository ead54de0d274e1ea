"""Shallow copies of a module and of all modules in it: the same classes, tensors and settings in new objects."""

import functools
from collections import OrderedDict
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# values of these types refer to no module
NUMBERS = (bool, int, float, str, type(None), torch.dtype, torch.device)
PLAIN = frozenset((*NUMBERS, set, Tensor, nn.Parameter, FunctionType, BuiltinFunctionType))
CONTAINERS = (dict, OrderedDict, list, tuple)


def shallow_copy(root: nn.Module, *, copy_containers: bool = False) -> nn.Module:
    """A module that computes the same, and whose parameters and submodules can be exchanged.

    Attributes that refer to modules of the original (a list of layers, a bound method) refer to their copies.
    Other lists and dicts are shared, or copied with `copy_containers`.
    """
    copies: dict[int, Any] = {id(module): object.__new__(type(module)) for module in root.modules()}

    def translate(value: Any, depth: int = 3) -> Any:
        if type(value) in PLAIN or (type(value) in CONTAINERS and not value and not copy_containers):
            return value
        if isinstance(value, nn.Module):
            return copies.get(id(value), value)
        if isinstance(value, MethodType):
            owner = translate(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if not depth:
            return value
        if isinstance(value, functools.partial):
            args = [translate(arg, depth - 1) for arg in value.args]
            return functools.partial(translate(value.func), *args, **translate(dict(value.keywords), depth - 1))
        if type(value) in (dict, OrderedDict):
            items = type(value)((key, translate(item, depth - 1)) for key, item in list(value.items()))
            return items if copy_containers or any(items[key] is not value[key] for key in items) else value
        if type(value) in (list, tuple):
            entries = [translate(item, depth - 1) for item in value]
            changed = any(one is not other for one, other in zip(entries, value, strict=True))
            return type(value)(entries) if copy_containers or changed else value
        return value

    for module in root.modules():
        state = {name: translate(value) for name, value in list(vars(module).items())}
        for register in ("_parameters", "_buffers", "_modules"):
            state[register] = {name: translate(value) for name, value in list(vars(module)[register].items())}
        vars(copies[id(module)]).update(state)
    return copies[id(root)]
