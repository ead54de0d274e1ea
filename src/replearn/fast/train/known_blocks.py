"""Fused forward methods for the ResNets of torchvision, timm and this package.

A method of another library is replaced only if its code is the one that the fused method was written for: the
digest of its statements is stored here. Another version's code is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...operators.functional import norm_add_act
from ..kernels.bn_add_relu import FusedBatchNorm2d, has_hooks, is_unobserved

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


def our_basic(self: Any, x: Tensor) -> Tensor:
    y = self.conv2(norm_add_act(self.conv1(x), self.bn1, self.relu))
    return norm_add_act(y, self.bn2, self.relu, self.shortcut(x))


def our_bottleneck(self: Any, x: Tensor) -> Tensor:
    y = self.conv2(norm_add_act(self.conv1(x), self.bn1, self.relu))
    y = self.conv3(norm_add_act(y, self.bn2, self.relu))
    return norm_add_act(y, self.bn3, self.relu, self.shortcut(x))


def our_resnet(self: Any, x: Tensor) -> Tensor:
    x = norm_add_act(self.conv1(x), self.bn1, self.relu)
    x = self.layer3(self.layer2(self.layer1(x)))
    made: Tensor = self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))
    return made


def torchvision_basic(self: Any, x: Tensor) -> Tensor:
    out = self.conv2(norm_add_act(self.conv1(x), self.bn1, self.relu))
    identity = x if self.downsample is None else self.downsample(x)
    return norm_add_act(out, self.bn2, self.relu, identity, in_place=True)


def torchvision_bottleneck(self: Any, x: Tensor) -> Tensor:
    out = self.conv2(norm_add_act(self.conv1(x), self.bn1, self.relu))
    out = self.conv3(norm_add_act(out, self.bn2, self.relu))
    identity = x if self.downsample is None else self.downsample(x)
    return norm_add_act(out, self.bn3, self.relu, identity, in_place=True)


def torchvision_resnet(self: Any, x: Tensor) -> Tensor:
    x = self.maxpool(norm_add_act(self.conv1(x), self.bn1, self.relu))
    x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
    made: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
    return made


def timm_basic(self: Any, x: Tensor) -> Tensor:
    out = self.conv2(self.aa(norm_drop_act(self.conv1(x), self.bn1, self.drop_block, self.act1)))
    return timm_residual(self, x, out, self.bn2, self.act2)


def timm_bottleneck(self: Any, x: Tensor) -> Tensor:
    out = self.conv2(norm_add_act(self.conv1(x), self.bn1, self.act1))
    out = self.conv3(self.aa(norm_drop_act(out, self.bn2, self.drop_block, self.act2)))
    return timm_residual(self, x, out, self.bn3, self.act3)


def timm_residual(self: Any, shortcut: Tensor, x: Tensor, norm: nn.Module, activation: Any) -> Tensor:
    direct = self.se is None and self.drop_path is None
    if not direct:
        x = norm(x)
        x = x if self.se is None else self.se(x)
        x = x if self.drop_path is None else self.drop_path(x)
    if self.downsample is not None:
        shortcut = self.downsample(shortcut)
    if direct:
        return norm_add_act(x, norm, activation, shortcut, in_place=True)
    x += shortcut
    made: Tensor = activation(x)
    return made


def norm_drop_act(x: Tensor, norm: nn.Module, drop: nn.Module, activation: Any) -> Tensor:
    """activation(drop(norm(x))); drop is an Identity by default."""
    if type(drop) is nn.Identity and not has_hooks(drop) and is_unobserved():
        return norm_add_act(x, norm, activation)
    made: Tensor = activation(drop(norm(x)))
    return made


def timm_features(self: Any, x: Tensor) -> Tensor:
    x = self.maxpool(norm_add_act(self.conv1(x), self.bn1, self.act1))
    stages = [self.layer1, self.layer2, self.layer3, self.layer4]
    if self.grad_checkpointing:
        made: Tensor = sys.modules["timm.models.resnet"].checkpoint_seq(stages, x, flatten=True)
        return made
    for stage in stages:
        x = stage(x)
    return x


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
    (_OURS, "BasicBlock"): ("forward", None, our_basic),
    (_OURS, "Bottleneck"): ("forward", None, our_bottleneck),
    (_OURS, "CifarResNet"): ("forward", None, our_resnet),
    (_TORCHVISION, "BasicBlock"): ("forward", "526c00339e0341fc9c41ed7908fc3984", torchvision_basic),
    (_TORCHVISION, "Bottleneck"): ("forward", "69ff145d4433fa782f68866ef48fc210", torchvision_bottleneck),
    (_TORCHVISION, "ResNet"): ("_forward_impl", "cf452043a2333a9b0b5769a7df85aee7", torchvision_resnet),
    (_TIMM, "BasicBlock"): ("forward", "24d1455c841b16581f6e3400b3981efd", timm_basic),
    (_TIMM, "Bottleneck"): ("forward", "45e56d6e40f2a2521327fa4bfe81aecf", timm_bottleneck),
    (_TIMM, "ResNet"): ("forward_features", "5221fbb9f9a6f03e207d566a3f017d11", timm_features),
}
