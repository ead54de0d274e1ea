"""Fold BatchNorms into the convolutions before them, where a trace shows that nothing else reads the values.

    W'_c = W_c s_c,  bias'_c = bias_c s_c + t_c   with BN(y)_c = s_c y_c + t_c      (eq:deploy_bn_folding)

In the trace of the module that calls both, the norm must be called once, on the output of a convolution that is
called once and has no other user. Every other BatchNorm stays, with the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from ..blocks.tracing import is_container, is_sequence, trace
from ..errors import ReplearnError
from ..operators._base.layers import norm_as_affine
from ..surgery.replace import set_submodule

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "FrozenBatchNorm2d")
_NORMS_WITH_ACTIVATION = ("BatchNormAct2d", "SyncBatchNormAct", "FrozenBatchNormAct2d")  # timm's


@dataclass(frozen=True, kw_only=True)
class Fold:
    """A BatchNorm by name, with the convolution that it is folded into, or the reason why it stays."""

    norm: str
    conv: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.norm} -> {self.conv}" if self.conv else f"{self.norm} stays: {self.reason}"


def find_folds(model: nn.Module) -> tuple[Fold, ...]:
    """For every BatchNorm of a model in eval mode, the convolution that it can be folded into, or why it stays.

    >>> import replearn
    >>> folds = replearn.fast.find_folds(replearn.models.resnet32().eval())
    >>> str(folds[0]), all(fold.conv for fold in folds)
    ('bn1 -> conv1', True)
    """
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    return Traces(model).folds()


@torch.no_grad()
def fold_(model: nn.Module) -> tuple[Fold, ...]:
    """Fold what `find_folds` names, in place."""
    folds = find_folds(model)
    for fold in folds:
        if fold.conv is not None:
            conv, norm = model.get_submodule(fold.conv), model.get_submodule(fold.norm)
            set_submodule(model, fold.conv, folded(conv, norm))
            set_submodule(model, fold.norm, remainder(norm).eval())
    return folds


class Traces:
    """Traces of every module whose forward may call a BatchNorm."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        # a shared weight or layer can't be changed for one of its uses
        self.links = Counter(id(child) for part in self.modules.values() for child in part._modules.values())
        self.uses = Counter(id(p) for part in self.modules.values() for p in part._parameters.values())
        self.norms = [name for name, module in self.modules.items() if norm_type(module)]
        names = {owner for norm in self.norms for owner in self.owners(norm)}
        self.graphs = {name: trace(self.modules[name]) for name in names}

    def owners(self, name: str) -> list[str]:
        """The enclosing modules that have a forward, innermost first; the model itself last."""
        above = []
        while name:
            name = name.rpartition(".")[0]
            module = self.modules[name]
            if not name or not (is_sequence(module) or is_container(module)):
                above.append(name)
        return above

    def folds(self) -> tuple[Fold, ...]:
        found = {norm: self.fold_of(norm) for norm in self.norms}
        for owner in self.graphs:
            pairs = {n: fold.conv for n, fold in found.items() if fold.conv and self.owners(n)[0] == owner}
            if pairs and (failure := self.failure_without(owner, pairs)):
                found |= {norm: Fold(norm=norm, reason=failure) for norm in pairs}
        return tuple(found.values())

    def failure_without(self, owner: str, pairs: dict[str, str]) -> str | None:
        """Why the code fails without these norms, as code that reads their attributes; None if it does not."""
        prefix = f"{owner}." if owner else ""
        substitutes: dict[str, nn.Module] = {}
        for norm, conv in pairs.items():
            substitutes[norm.removeprefix(prefix)] = nn.Identity()
            substitutes[conv.removeprefix(prefix)] = _with_bias(self.modules[conv])
        again = trace(self.modules[owner], substitutes=substitutes)
        if isinstance(again, str) or _steps(again) != _steps(self.graphs[owner]):
            return f"the code of {owner or 'the model'} asks for more than the output of its layers"
        return None

    def fold_of(self, name: str) -> Fold:
        """The convolution that a norm may be folded into, or the reason against it."""
        norm: Any = self.modules[name]
        stays = partial(Fold, norm=name)
        if norm.running_mean is None or norm.training:
            return stays(reason="it uses the statistics of each batch")
        owner, *above = self.owners(name)
        graph, label = self.graphs[owner], owner or "the model"
        if isinstance(graph, str):
            return stays(reason=f"the code of {label} can't be traced ({graph})")
        prefix = f"{owner}." if owner else ""
        calls = _calls(graph, name.removeprefix(prefix))
        if len(calls) != 1:
            return stays(reason=f"{label} calls it {len(calls)} times")
        node = calls[0]
        source = node.args[0] if node.args else None
        if len(node.args) != 1 or node.kwargs or not isinstance(source, fx.Node) or source.op != "call_module":
            return stays(reason="its input is not the output of a convolution")
        conv = prefix + str(source.target)
        if conv not in self.modules:  # a module is listed once, under the first of its names
            return stays(reason=f"{conv} is shared with another part of the model")
        module: Any = self.modules[conv]
        if not is_convolution(module):
            return stays(reason=f"its input comes from {conv}, a {type(module).__name__}")
        if len(source.users) != 1 or len(_calls(graph, str(source.target))) != 1:
            return stays(reason=f"the output of {conv} is used elsewhere too")
        if module.out_channels != norm.running_mean.numel():
            own = norm.running_mean.numel()
            return stays(reason=f"{conv} has {module.out_channels} channels, and it has {own}")
        reason = self.objection(conv, name, owner, above)
        return stays(reason=reason) if reason else Fold(norm=name, conv=conv)

    def objection(self, conv: str, norm: str, owner: str, above: list[str]) -> str | None:
        """Why a matching pair must not be folded (sharing, hooks, dtypes, other uses); None if it can be."""
        for name in (conv, norm):
            module = self.modules[name]
            if self.links[id(module)] > 1 or any(
                self.uses[id(p)] > 1 for p in module._parameters.values() if p is not None
            ):
                return f"{name} is shared with another part of the model"
            if module._forward_hooks or module._forward_pre_hooks:
                return f"{name} has hooks, which would see other values"
        weight: Any = self.modules[conv].weight
        if weight.dtype != self.modules[norm].running_mean.dtype:
            return f"{conv} computes in {weight.dtype}, and it in {self.modules[norm].running_mean.dtype}"
        for place in (owner, *above):
            graph, prefix = self.graphs[place], f"{place}." if place else ""
            for name in (conv, norm):
                if isinstance(graph, str):
                    if name.rpartition(".")[2] in names_in_code(self.modules[place]):
                        return f"{place or 'the model'} can't be traced ({graph}) and may use {name} as well"
                elif reaches(graph, name.removeprefix(prefix), called=place == owner):
                    return f"{place or 'the model'} uses {name} as well"
        return None


def _with_bias(conv: Any) -> nn.Module:
    """The convolution with a bias."""
    made: nn.Module = copy.copy(conv)
    made._parameters = {**conv._parameters, "bias": nn.Parameter(conv.weight.new_empty(conv.out_channels))}
    return made


def _steps(graph: Any) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.nodes]


def _calls(graph: fx.Graph, target: str) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_module" and node.target == target]


def reaches(graph: fx.Graph, target: str, *, called: bool) -> bool:
    """True if the graph reads an attribute of this layer or, unless `called`, calls it."""
    return any(
        (node.op == "get_attr" and str(node.target).startswith(f"{target}."))
        or (node.op == "call_module" and node.target == target and not called)
        for node in graph.nodes
    )


def names_in_code(module: nn.Module) -> set[str]:
    """All attribute names and string constants in the code of a module's class."""
    names: set[str] = set()
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn"):
            continue
        for value in vars(cls).values():
            held = getattr(value, "fget", None) or getattr(value, "func", value)  # of a property
            code = getattr(inspect.unwrap(held), "__code__", None)
            names |= _names_in(code) if code and code.co_name != "__init__" else set()
    return names


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, CodeType))  # as comprehensions
    texts = (part for part in code.co_consts if isinstance(part, str))  # getattr takes names as strings
    return set(code.co_names).union(texts, *inner)


def norm_type(module: nn.Module) -> str | None:
    """'plain' or 'activated' for a BatchNorm of a known class, None for subclasses and other modules."""
    name, where = type(module).__name__, type(module).__module__.partition(".")[0]
    if name in _NORMS and where in ("torch", "torchvision", "timm"):
        return "plain"
    if name in _NORMS_WITH_ACTIVATION and where == "timm":
        return "activated"
    return None


def is_convolution(module: nn.Module) -> bool:
    """True for torch's convolutions and timm's Conv2dSame."""
    padded = type(module).__name__ == "Conv2dSame" and type(module).__module__.startswith("timm.")
    return type(module) in CONVOLUTIONS or padded


def folded(conv: Any, norm: Any) -> nn.Module:
    """A copy of the convolution with the norm folded in."""
    made: nn.Module = copy.copy(conv)
    made._parameters = dict(conv._parameters)
    wide = torch.float64 if conv.weight.device.type != "mps" else torch.float32
    scale, shift = norm_as_affine(norm, wide)
    weight, bias = conv.weight.to(wide), conv.bias
    if isinstance(conv, _TRANSPOSED):  # (in, out / groups, ...)
        by_group = scale.view(conv.groups, 1, -1).expand(-1, weight.shape[0] // conv.groups, -1)
        scaled = weight * by_group.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))
    else:
        scaled = weight * scale.view(-1, *[1] * (weight.dim() - 1))
    moved = shift if bias is None else bias.to(wide) * scale + shift
    trained = conv.weight.requires_grad
    made.weight = nn.Parameter(torch.empty_like(conv.weight).copy_(scaled), requires_grad=trained)
    made.bias = nn.Parameter(moved.to(conv.weight.dtype), requires_grad=trained)
    return made


def remainder(norm: Any) -> nn.Module:
    """What replaces a folded norm: nn.Identity, or its activation."""
    if norm_type(norm) == "plain":
        return nn.Identity()
    parts = [part for part in (norm.drop, norm.act) if not isinstance(part, nn.Identity)]
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)
