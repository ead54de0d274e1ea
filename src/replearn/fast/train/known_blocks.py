"""Code that we know, and the same with norms, sums and ReLUs as one.

A class of another library runs other code only while its own is, word for word, what stands here: a version that
computes something else is left alone. All conditions are asked when the code runs, as in the library's own.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...operators.functional import norm_add_act
from ..kernels.bn_add_relu import FusedBatchNorm2d, has_hooks, nobody_listens

Method = Callable[..., Tensor]


@dataclass(frozen=True)
class Known:
    """A method of a class in a library: its code, and what computes the same."""

    module: str
    kind: str
    method: str
    code: str | None  # None: it is ours
    fused: Method

    def found(self) -> type[nn.Module] | None:
        """The class, if its library is in use and the code is this; nobody has a model of one that is not."""
        kind: Any = getattr(sys.modules.get(self.module), self.kind, None)
        if kind is None or self.code is None:
            return kind  # type: ignore[no-any-return]
        return kind if says(getattr(kind, self.method, None), self.code) else None

    def tells_of(self, kind: Any) -> bool:
        named = (kind.__module__, kind.__name__) == (self.module, self.kind)
        return named and self.found() is kind


@cache
def says(method: Any, code: str) -> bool:
    """Whether a method's statements are these; comments, annotations and empty lines do not count."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source at hand
        return False
    body: list[Any] = list(getattr(found, "body", []))
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # what it says of itself
    expected = ast.parse(textwrap.dedent(code)).body
    return [ast.dump(line) for line in body] == [ast.dump(line) for line in expected]


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
    out = self.conv2(self.aa(dropping(self.conv1(x), self.bn1, self.drop_block, self.act1)))
    return timm_end(self, x, out, self.bn2, self.act2)


def timm_bottleneck(self: Any, x: Tensor) -> Tensor:
    out = self.conv2(norm_add_act(self.conv1(x), self.bn1, self.act1))
    out = self.conv3(self.aa(dropping(out, self.bn2, self.drop_block, self.act2)))
    return timm_end(self, x, out, self.bn3, self.act3)


def timm_end(self: Any, shortcut: Tensor, x: Tensor, norm: nn.Module, activation: Any) -> Tensor:
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


def dropping(x: Tensor, norm: nn.Module, drop: nn.Module, activation: Any) -> Tensor:
    """activation(drop(norm(x))), of which the middle does nothing as a rule."""
    if type(drop) is nn.Identity and not has_hooks(drop) and nobody_listens():
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


def sequence(self: Any, input: Any) -> Any:
    layers, place = list(self._modules.values()), 0
    while place < len(layers):
        layer = layers[place]
        if type(layer) is FusedBatchNorm2d and place + 1 < len(layers) and type(layers[place + 1]) is nn.ReLU:
            input, place = norm_add_act(input, layer, layers[place + 1]), place + 2
        else:
            input, place = layer(input), place + 1
    return input


OURS = "replearn.models.cifar_resnet"
KNOWN = (
    Known(OURS, "BasicBlock", "forward", None, our_basic),
    Known(OURS, "Bottleneck", "forward", None, our_bottleneck),
    Known(OURS, "CifarResNet", "forward", None, our_resnet),
    Known(
        "torchvision.models.resnet",
        "BasicBlock",
        "forward",
        """
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out
        """,
        torchvision_basic,
    ),
    Known(
        "torchvision.models.resnet",
        "Bottleneck",
        "forward",
        """
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out
        """,
        torchvision_bottleneck,
    ),
    Known(
        "torchvision.models.resnet",
        "ResNet",
        "_forward_impl",
        """
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x
        """,
        torchvision_resnet,
    ),
    Known(
        "timm.models.resnet",
        "BasicBlock",
        "forward",
        """
        shortcut = x
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.drop_block(x)
        x = self.act1(x)
        x = self.aa(x)
        x = self.conv2(x)
        x = self.bn2(x)
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act2(x)
        return x
        """,
        timm_basic,
    ),
    Known(
        "timm.models.resnet",
        "Bottleneck",
        "forward",
        """
        shortcut = x
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.act1(x)
        x = self.conv2(x)
        x = self.bn2(x)
        x = self.drop_block(x)
        x = self.act2(x)
        x = self.aa(x)
        x = self.conv3(x)
        x = self.bn3(x)
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act3(x)
        return x
        """,
        timm_bottleneck,
    ),
    Known(
        "timm.models.resnet",
        "ResNet",
        "forward_features",
        """
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.act1(x)
        x = self.maxpool(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq([self.layer1, self.layer2, self.layer3, self.layer4], x, flatten=True)
        else:
            x = self.layer1(x)
            x = self.layer2(x)
            x = self.layer3(x)
            x = self.layer4(x)
        return x
        """,
        timm_features,
    ),
)
