"""ResNets for 32x32 images: He et al. (2016), section 4.2, with 1x1-convolution shortcuts."""

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
        return self.relu(self.shortcut(x) + y)


def shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    """What goes around a block: its input as it is, or where the shape changes, a 1x1 convolution of it."""
    if stride == 1 and in_channels == channels:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))


class CifarResNet(nn.Module):
    """A ResNet of depth 6n + 2: three stages of n blocks with 16, 32 and 64 channels."""

    def __init__(self, depth: int, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6 or width < 1:
            raise ReplearnError(
                f"A CIFAR ResNet has 6n + 2 layers (20, 32, ...) of a width, not {depth} of {width}."
            )
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = stage(width, width, blocks, 1)
        self.layer2 = stage(width, 2 * width, blocks, 2)
        self.layer3 = stage(2 * width, 4 * width, blocks, 2)
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))


def resnet32(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """ResNet-32 for CIFAR: three stages of 5 blocks."""
    return CifarResNet(32, num_classes, in_channels)


def resnet56(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """ResNet-56 for CIFAR: three stages of 9 blocks."""
    return CifarResNet(56, num_classes, in_channels)


def resnet110(num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """ResNet-110 for CIFAR: three stages of 18 blocks."""
    return CifarResNet(110, num_classes, in_channels)
