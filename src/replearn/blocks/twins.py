"""A second object for a module and for each module in it, with the same classes, tensors and settings."""

import functools
from collections import OrderedDict
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# values of these kinds point at no module
NUMBERS = (bool, int, float, str, type(None), torch.dtype, torch.device)
PLAIN = frozenset((*NUMBERS, set, Tensor, nn.Parameter, FunctionType, BuiltinFunctionType))
CONTAINERS = (dict, OrderedDict, list, tuple)


def twin_of(root: nn.Module, *, own_containers: bool = False) -> nn.Module:
    """A module that computes what this one does, and in which parameters and submodules can be exchanged.

    Attributes that point at modules of the original (a list of layers, a bound method) point at their twins.
    Other lists and dicts are shared, or copied with `own_containers`.
    """
    twins: dict[int, Any] = {id(module): object.__new__(type(module)) for module in root.modules()}

    def turned(value: Any, depth: int = 3) -> Any:
        if type(value) in PLAIN or (type(value) in CONTAINERS and not value and not own_containers):
            return value
        if isinstance(value, nn.Module):
            return twins.get(id(value), value)
        if isinstance(value, MethodType):
            owner = turned(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if not depth:
            return value
        if isinstance(value, functools.partial):
            args = [turned(arg, depth - 1) for arg in value.args]
            return functools.partial(turned(value.func), *args, **turned(dict(value.keywords), depth - 1))
        if type(value) in (dict, OrderedDict):
            made = type(value)((key, turned(item, depth - 1)) for key, item in list(value.items()))
            return made if own_containers or any(made[key] is not value[key] for key in made) else value
        if type(value) in (list, tuple):
            items = [turned(item, depth - 1) for item in value]
            changed = any(one is not other for one, other in zip(items, value, strict=True))
            return type(value)(items) if own_containers or changed else value
        return value

    for module in root.modules():
        state = {name: turned(value) for name, value in list(vars(module).items())}
        for register in ("_parameters", "_buffers", "_modules"):
            state[register] = {name: turned(value) for name, value in list(vars(module)[register].items())}
        vars(twins[id(module)]).update(state)
    return twins[id(root)]
