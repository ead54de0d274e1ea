"""Checks that a model is not wrapped, sharded, compiled or replaced; copies of models without wrappers."""

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


# Importing torch._dynamo or FSDP takes seconds, and without them no module is compiled or sharded: both are looked
# up in sys.modules.


def _wrapped(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return isinstance(module, getattr(dynamo, "OptimizedModule", ()))  # another thread may be importing it


def _uncompiled(name: str, module: nn.Module) -> str:
    """How to get the module without the compiled wrapper, for the error message."""
    path = f"model.{name}" if name else "model"
    if not hasattr(module, "_orig_mod"):
        return f"a fresh model, before {path}.compile()"
    return f"a model with {path}._orig_mod in its place" if name else "the plain model (model._orig_mod)"


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper; any other module itself."""
    while _wrapped(model):
        model = model.get_submodule("_orig_mod")
    return model


def own_copy(model: nn.Module, *, share: bool = False) -> nn.Module:
    """A copy without torch.compile's wrappers, which hide code and rename weights; `share` shares the weights."""
    shared = {id(parameter): parameter for parameter in model.parameters()} if share else {}
    copied = copy.deepcopy(unwrapped(model), shared)
    for module in list(copied.modules()):
        for name, child in module._modules.items():
            if child is not None and _wrapped(child):
                module._modules[name] = unwrapped(child)
    return copied


def _sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
        return True
    return any(hasattr(parameter, "device_mesh") for parameter in module._parameters.values())


# Tensors created within torch.inference_mode can't be trained or written to outside of it.


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Inside, new tensors are ordinary ones without gradients, also if the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def writable(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """Model and example, or copies of those with inference tensors: a model's code may write to both."""
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    model = own_copy(model) if any(tensor.is_inference() for tensor in tensors) else model
    return model, tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, example)
