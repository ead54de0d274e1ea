"""Tiny models for the tests of placement, plans, checkpoints and errors: a few kilobytes each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import replearn
from replearn.models.cifar_resnet import stage


class Stages(nn.Module):
    """A residual network with stages of these lengths; every stage after the first halves the image."""

    def __init__(self, *lengths: int, width: int = 4) -> None:
        super().__init__()
        channels = [width * (1 + index) for index in range(len(lengths))]
        before = [width, *channels]
        self.stages = nn.Sequential(
            *(stage(before[i], channels[i], length, stride=1 if i == 0 else 2) for i, length in enumerate(lengths))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stages(x)
        return out


class Bottleneck(nn.Module):
    """A bottleneck of the user's own, told to replearn by its anatomy."""

    replearn_anatomy = replearn.anatomy(
        "mine", "bottleneck", conv1="a", conv2="b", conv3="c", norm="norm", activation="act"
    )

    def __init__(self, width: int, groups: int = 1, dilation: int = 1) -> None:
        super().__init__()
        middle = width // 2
        self.a = nn.Conv2d(width, middle, 1, bias=False)
        self.b = nn.Conv2d(middle, middle, 3, padding=dilation, dilation=dilation, groups=groups, bias=False)
        self.c = nn.Conv2d(middle, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(x + self.norm(self.c(self.act(self.b(self.act(self.a(x)))))))
        return out


class Own(nn.Module):
    """A block that no family knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.mix(x))


class Tokens(nn.Module):
    """A transformer with embeddings tied to its head; called with keywords, returns a dict."""

    def __init__(self, depth: int = 4, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.embed(tokens) * scale
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def resnet(depth: int = 20, width: int = 4) -> replearn.models.CifarResNet:
    """Three stages of 3 blocks, or of (depth - 2) / 6."""
    return replearn.models.CifarResNet(depth, width=width)


def settled_resnet(side: int) -> replearn.models.CifarResNet:
    """In eval mode, its running statistics away from their start."""
    torch.manual_seed(0)
    model = resnet()
    for _ in range(3):
        model(torch.randn(16, 3, side, side))
    return model.eval()


def replaced(model: nn.Module, **placement: object) -> nn.Module:
    """The model with a plan carried out on it: the densest, unless told otherwise."""
    chosen = placement or {"interval": 2, "first": 2}
    return replearn.replace_(model, replearn.plan(model, **chosen))  # type: ignore[arg-type]
