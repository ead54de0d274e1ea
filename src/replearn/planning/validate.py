"""Refuse models that are wrapped, sharded, compiled or replaced already; copy them without wrappers."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map_only

from ..errors import ReplearnError
from ..operators._base.operator import Operator


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ReplearnError for anything but an ordinary, unreplaced module."""
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module as the first argument, got {type(model).__name__}.")
    for name, module in model.named_modules():
        where = f"its submodule {name}" if name else "it"
        if isinstance(module, Operator):
            raise ReplearnError(
                f"{type(model).__name__} is replaced already ({name} is an operator). Start from a fresh model; "
                "to change a plan, plan again on that."
            )
        if reason := _unplannable(name, module):
            raise ReplearnError(f"{type(model).__name__} can't be planned: {where} is {reason}")


def _unplannable(name: str, module: nn.Module) -> str:
    """Why a module can't be planned, and what to do instead; '' if it can."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return (
            f"wrapped in {type(module).__name__}. Call plan and replace_ on the plain model first, then wrap the "
            "result."
        )
    if _wrapped(module) or module._compiled_call_impl is not None:
        return (
            "compiled, and would go on running its old graph. Call plan and replace_ on "
            f"{_uncompiled(name, module)}, then compile the result."
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module, whose blocks can't be exchanged. Start from the Python model."
    if any(isinstance(parameter, UninitializedParameter) for parameter in module._parameters.values()):
        return "lazy and has no shape yet. Run the model once on a batch, then plan."
    if _sharded(module):
        return (
            "sharded (FSDP or tensor parallel). Call plan and replace_ on the plain model first, then fully_shard "
            "every block, operators included."
        )
    return ""


# Importing torch._dynamo or FSDP takes seconds. Where nobody has imported them yet, no module can be
# compiled or sharded, so both are looked up among what is loaded.


def _wrapped(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return isinstance(module, getattr(dynamo, "OptimizedModule", ()))  # another thread may be importing it


def _uncompiled(name: str, module: nn.Module) -> str:
    """Where to find, or how to get, what is not compiled."""
    path = f"model.{name}" if name else "model"
    if not hasattr(module, "_orig_mod"):
        return f"a fresh model, before {path}.compile()"
    return f"a model with {path}._orig_mod in its place" if name else "the plain model (model._orig_mod)"


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given; any other as it is."""
    while _wrapped(model):
        model = model.get_submodule("_orig_mod")
    return model


def own_copy(model: nn.Module, *, share: bool = False) -> nn.Module:
    """A copy without torch.compile's wrappers, which hide code and rename weights; `share` copies no weights."""
    shared = {id(parameter): parameter for parameter in model.parameters()} if share else {}
    made = copy.deepcopy(unwrapped(model), shared)
    for module in list(made.modules()):
        for name, child in module._modules.items():
            if child is not None and _wrapped(child):
                module._modules[name] = unwrapped(child)
    return made


def _sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
        return True
    return any(hasattr(parameter, "device_mesh") for parameter in module._parameters.values())


# Tensors that are made within torch.inference_mode can't be trained, written to or given gradients after it.


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make ordinary tensors, without gradients, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def writable(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """The two, or copies of what was made within inference mode: a model's code may write to both."""
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    model = own_copy(model) if any(tensor.is_inference() for tensor in tensors) else model
    return model, tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, example)
