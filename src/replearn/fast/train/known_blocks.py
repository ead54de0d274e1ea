"""Fused forward methods for the ResNets of torchvision, timm and this package.

A method of another library is replaced only if its code is the one that the fused method was written for: the
digest of its statements is stored here. Another version's code is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...operators.functional import norm_add_act
from ..kernels.bn_add_relu import FusedBatchNorm2d, has_hooks

Method = Callable[..., Tensor]


def fused_method_of(original: Any) -> tuple[str, Method] | None:
    """The name of a class's method and its fused version, if the class and its code are known."""
    known = KNOWN.get((original.__module__, original.__name__))
    if known is None:
        return None
    method, digest, fused = known
    if digest is not None and digest_of(getattr(original, method, None)) != digest:
        return None
    return method, fused


@cache
def digest_of(method: Any) -> str | None:
    """A digest of a method's statements, without comments, annotations and docstring; None without source."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    body: list[Any] = list(getattr(found, "body", []))
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return hashlib.sha256("\n".join(ast.unparse(line) for line in body).encode()).hexdigest()[:32]


def is_plain(module: Any) -> bool:
    """True without attention or dropping between norms, sums and activations, and without recomputation."""
    between = [getattr(module, name, None) for name in ("se", "drop_path", "drop_block", "aa")]
    idle = all(part is None or (type(part) is nn.Identity and not has_hooks(part)) for part in between)
    return idle and not getattr(module, "grad_checkpointing", False)


def fused_block(*activations: str, in_place: bool = True) -> Method:
    """The forward of a residual block of conv1, bn1, conv2, bn2, ..., with these activations behind the norms."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y, residual = x, None
        for number, activation in enumerate(activations, start=1):
            y = getattr(self, f"conv{number}")(y)
            if number == len(activations):
                residual = shortcut_of(self, x)
            norm, relu = getattr(self, f"bn{number}"), getattr(self, activation)
            y = norm_add_act(y, norm, relu, residual, in_place=in_place)
        return y

    return forward


def shortcut_of(block: Any, x: Tensor) -> Tensor:
    shortcut = block.shortcut if hasattr(block, "shortcut") else block.downsample
    return x if shortcut is None else shortcut(x)


def our_resnet(self: Any, x: Tensor) -> Tensor:
    x = norm_add_act(self.conv1(x), self.bn1, self.relu)
    x = self.layer3(self.layer2(self.layer1(x)))
    return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def torchvision_resnet(self: Any, x: Tensor) -> Tensor:
    x = self.maxpool(norm_add_act(self.conv1(x), self.bn1, self.relu))
    x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
    return self.fc(torch.flatten(self.avgpool(x), 1))


def timm_features(self: Any, x: Tensor) -> Tensor:
    x = self.maxpool(norm_add_act(self.conv1(x), self.bn1, self.act1))
    return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def fused_sequential(self: Any, input: Any) -> Any:
    layers, place = list(self._modules.values()), 0
    while place < len(layers):
        layer = layers[place]
        if type(layer) is FusedBatchNorm2d and place + 1 < len(layers) and type(layers[place + 1]) is nn.ReLU:
            input, place = norm_add_act(input, layer, layers[place + 1]), place + 2
        else:
            input, place = layer(input), place + 1
    return input


_OURS, _TORCHVISION, _TIMM = "replearn.models.cifar_resnet", "torchvision.models.resnet", "timm.models.resnet"
# by module and class: the method, the digest of its code (None for our own), and its fused version
KNOWN: dict[tuple[str, str], tuple[str, str | None, Method]] = {
    (_OURS, "BasicBlock"): ("forward", None, fused_block("relu", "relu", in_place=False)),
    (_OURS, "CifarResNet"): ("forward", None, our_resnet),
    (_TORCHVISION, "BasicBlock"): ("forward", "526c00339e0341fc9c41ed7908fc3984", fused_block("relu", "relu")),
    (_TORCHVISION, "Bottleneck"): (
        "forward",
        "69ff145d4433fa782f68866ef48fc210",
        fused_block("relu", "relu", "relu"),
    ),
    (_TORCHVISION, "ResNet"): ("_forward_impl", "cf452043a2333a9b0b5769a7df85aee7", torchvision_resnet),
    (_TIMM, "BasicBlock"): ("forward", "24d1455c841b16581f6e3400b3981efd", fused_block("act1", "act2")),
    (_TIMM, "Bottleneck"): ("forward", "45e56d6e40f2a2521327fa4bfe81aecf", fused_block("act1", "act2", "act3")),
    (_TIMM, "ResNet"): ("forward_features", "5221fbb9f9a6f03e207d566a3f017d11", timm_features),
}
