"""ResNets for 32x32 images: He et al. (2016), section 4.2, with 1x1-convolution shortcuts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..blocks.anatomy import anatomy
from ..errors import ReplearnError


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is a 1x1 convolution where the shape changes."""

    replearn_anatomy = anatomy(
        "cifar_resnet", "basic", conv1="conv1", conv2="conv2", norm="bn2", activation="relu"
    )

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu(self.shortcut(x) + y)
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the middle is a quarter as wide as the ends."""

    replearn_anatomy = anatomy(
        "cifar_resnet",
        "bottleneck",
        conv1="conv1",
        conv2="conv2",
        conv3="conv3",
        norm="bn3",
        activation="relu",
    )

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        middle = channels // 4
        self.conv1 = nn.Conv2d(in_channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu(self.shortcut(x) + y)
        return out


def shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    """What goes around a block: its input as it is, or where the shape changes, a 1x1 convolution of it."""
    if stride == 1 and in_channels == channels:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))


class CifarResNet(nn.Module):
    """A ResNet of depth 6n + 2: three stages of n blocks with 16, 32 and 64 channels.

    With `bottleneck=True` it is one of depth 9n + 2 and four times the channels, as ResNet-164.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int = 10,
        in_channels: int = 3,
        width: int = 16,
        *,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        layers = 9 if bottleneck else 6
        if depth < layers + 2 or (depth - 2) % layers:
            known = "29, 47, 110, 164, ..." if bottleneck else "20, 32, 56, 110, ..."
            kind = "CIFAR ResNet of bottlenecks" if bottleneck else "CIFAR ResNet"
            raise ReplearnError(f"A {kind} has {layers}n + 2 layers ({known}), not {depth}.")
        blocks = (depth - 2) // layers
        widths = [width * factor * (4 if bottleneck else 1) for factor in (1, 2, 4)]
        block = Bottleneck if bottleneck else BasicBlock
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = stage(width, widths[0], blocks, 1, block)
        self.layer2 = stage(widths[0], widths[1], blocks, 2, block)
        self.layer3 = stage(widths[1], widths[2], blocks, 2, block)
        self.fc = nn.Linear(widths[2], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))
        return out


def stage(
    in_channels: int,
    channels: int,
    blocks: int,
    stride: int,
    block: Callable[[int, int, int], nn.Module] = BasicBlock,
) -> nn.Sequential:
    first = block(in_channels, channels, stride)
    return nn.Sequential(first, *(block(channels, channels, 1) for _ in range(blocks - 1)))


def resnet32(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """ResNet-32 for CIFAR: three stages of 5 blocks."""
    return CifarResNet(32, num_classes, in_channels)


def resnet56(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """ResNet-56 for CIFAR: three stages of 9 blocks."""
    return CifarResNet(56, num_classes, in_channels)


def resnet110(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """ResNet-110 for CIFAR: three stages of 18 blocks."""
    return CifarResNet(110, num_classes, in_channels)
