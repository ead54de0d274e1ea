"""What users do to their models before they bring them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import replearn

from .models import BLOCKS, Shape


def quirky(model: nn.Module, shape: Shape) -> nn.Module:
    """What users do to their models."""
    quirk = shape.quirk
    stacks = replearn.find_stacks(model)
    blocks = [model.get_submodule(name) for name in stacks[0].blocks] if stacks else []
    parameters = [name for name, _ in blocks[0].named_parameters()] if blocks else []
    if len(blocks) < 3 or not parameters:
        return model
    if quirk == "frozen":
        for block in blocks[1::2]:
            block.requires_grad_(False)
    elif quirk == "all frozen":
        model.requires_grad_(False)
    elif quirk == "partly frozen":
        for block in blocks:
            next(block.parameters()).requires_grad_(False)
    elif quirk == "tied in the stack":
        fits = blocks[0].get_parameter(parameters[0]).shape == blocks[-1].get_parameter(parameters[0]).shape
        put(blocks[-1], parameters[0], blocks[0 if fits else 1].get_parameter(parameters[0]))
    elif quirk == "tied to the outside":
        model.register_parameter("outside", blocks[1].get_parameter(parameters[0]))
    elif quirk == "hooked":
        blocks[1].register_forward_hook(watch)
    elif quirk == "hooked before":
        blocks[1].register_forward_pre_hook(watch_before)
    elif quirk == "hooked backward":
        blocks[1].register_full_backward_hook(watch)
    elif quirk == "hooked inside":
        leaf = next(part for part in blocks[1].modules() if not list(part.children()))
        leaf.register_forward_hook(watch)
    elif quirk == "repeated":
        owner, _, key = stacks[0].blocks[-1].rpartition(".")
        model.get_submodule(owner)._modules[key] = blocks[1]
    elif quirk == "shared part":
        name, part = next(((n, p) for n, p in blocks[1].named_children()), ("", None))
        if part is not None:
            for block in blocks[2:]:
                block._modules[name] = part
    elif quirk == "odd block" and shape.block in BLOCKS:
        odd = replace(shape, kernel=4 - shape.kernel, groups=3 - shape.groups, bias=not shape.bias)
        owner, _, key = stacks[0].blocks[len(blocks) // 2].rpartition(".")
        model.get_submodule(owner)._modules[key] = BLOCKS[shape.block](odd).to(getattr(torch, shape.dtype))
    elif quirk == "other dtype" and shape.dtype == "float32":
        for block in blocks[1:2]:
            block.register_buffer("table", torch.zeros(3, dtype=torch.complex64))
    elif quirk in ("spectral norm", "weight norm"):
        wrap = torch.nn.utils.parametrizations.spectral_norm
        wrap = wrap if quirk == "spectral norm" else torch.nn.utils.parametrizations.weight_norm
        for block in blocks:
            layer = next((m for m in block.modules() if type(m) in (nn.Linear, nn.Conv2d)), None)
            if layer is not None and layer.weight.dtype is not torch.bfloat16:
                wrap(layer)
    elif quirk in ("extra buffer", "unsaved buffer"):
        for index, block in enumerate(blocks):
            block.register_buffer("count", torch.tensor(index), persistent=quirk == "extra buffer")
    elif quirk == "other class":
        blocks[len(blocks) // 2].__class__ = type("Other", (type(blocks[0]),), {})
    return model


def put(block: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, key = name.rpartition(".")
    block.get_submodule(owner)._parameters[key] = parameter


def watch(module: nn.Module, *what: Any) -> None:
    """A hook that looks and changes nothing."""


def watch_before(module: nn.Module, args: Any) -> None:
    """The same, before."""
