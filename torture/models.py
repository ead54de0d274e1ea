"""Random networks: what users bring, and what they do to it before they bring it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import replearn

from .libraries import LIBRARIES

CONV_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "batch, bare": lambda width: nn.BatchNorm2d(width, affine=False),
    "batch, no statistics": lambda width: nn.BatchNorm2d(width, track_running_stats=False),
    "group": lambda width: nn.GroupNorm(2, width),
    "instance": lambda width: nn.InstanceNorm2d(width, affine=True),
    "none": lambda width: nn.Identity(),
}
TOKEN_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer, bare": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "rms": nn.RMSNorm,
    "none": lambda width: nn.Identity(),
}
ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "prelu": nn.PReLU,
    "gelu": nn.GELU,
    "function": lambda: F.gelu,
}
CONTAINERS = ("list", "list", "sequence", "sequence", "mixed", "nested", "dict", "attributes", "stages")
SELDOM = ("linear", "nothing", "recurrent")  # most of these are refused
QUIRKS = (
    "none", "none", "none", "frozen", "all frozen", "partly frozen", "tied in the stack", "tied to the outside",
    "hooked", "hooked before", "hooked backward", "hooked inside", "repeated", "shared part", "odd block",
    "spectral norm", "weight norm", "extra buffer", "unsaved buffer", "other class", "other dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One random model, small enough to print."""

    block: str
    depth: int
    width: int
    groups: int
    dilation: int
    kernel: int
    heads: int
    bias: bool
    norm_first: bool
    norm: str
    activation: str
    dropout: float
    container: str
    twins: int
    quirk: str
    dtype: str

    @property
    def images(self) -> bool:
        return self.block in ("basic", "bottleneck", "depthwise")

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        from .quirks import quirky

        made = LIBRARIES[self.block](self) if self.block in LIBRARIES else Model(self)
        return quirky(made.to(getattr(torch, self.dtype)), self)

    def example(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        if self.block in ("llama", "gpt2", "bert"):
            return torch.randint(0, 32, (2, 5), generator=generator)
        size = (3, self.width, 6, 6) if self.images else (3, 5, self.width)
        size = (3, 3, 8, 8) if self.block in LIBRARIES else size
        made = torch.randn(size, generator=generator)
        return made.to(getattr(torch, self.dtype))


def draw_shape(random: Random, libraries: bool = False) -> Shape:
    block = random.choice(sorted(BLOCKS))
    if block in SELDOM or (libraries and random.random() < 0.2):
        block = random.choice(sorted(LIBRARIES) if libraries else sorted(BLOCKS))
    images = block in ("basic", "bottleneck", "depthwise")
    dtypes = ("float32", "float32", "float64", "bfloat16")
    if block == "resnet":  # the CPU's strided bfloat16 gradient on a 1x1 image reads stray memory
        dtypes = dtypes[:3]
    return Shape(
        block=block,
        depth=random.choice((2, 4, 5, 6, 6, 7, 9)),
        width=random.choice((4, 8, 12)),
        groups=random.choice((1, 1, 2)),
        dilation=random.choice((1, 1, 2)),
        kernel=random.choice((1, 3, 3)),
        heads=random.choice((1, 2, 4)),
        bias=random.random() < 0.5,
        norm_first=random.random() < 0.5,
        norm=random.choice(sorted(CONV_NORMS if images else TOKEN_NORMS)),
        activation=random.choice(sorted(ACTIVATIONS)),
        dropout=random.choice((0.0, 0.0, 0.3)),
        container=random.choice(CONTAINERS),
        twins=random.choice((1, 1, 2)),
        quirk=random.choice(QUIRKS),
        dtype=random.choice(dtypes),
    )


class Residual(nn.Module):
    """Convolutions of any sort around a shortcut."""

    def __init__(self, shape: Shape, middle: int) -> None:
        super().__init__()
        thin = shape.block == "bottleneck"
        self.first = conv(shape, shape.width, middle, 1 if thin else shape.kernel)
        self.between = conv(shape, middle, middle, shape.kernel) if thin else None
        self.last = conv(shape, middle, shape.width, 1 if thin else shape.kernel)
        self.norm = CONV_NORMS[shape.norm](shape.width)
        self.activation = ACTIVATIONS[shape.activation]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.first(x))
        if self.between is not None:
            y = self.activation(self.between(y))
        out: Tensor = self.activation(x + self.norm(self.last(y)))
        return out


def conv(shape: Shape, inputs: int, outputs: int, kernel: int) -> nn.Conv2d:
    groups = shape.groups if kernel > 1 else 1
    padding = shape.dilation * (kernel // 2)
    return nn.Conv2d(
        inputs, outputs, kernel, padding=padding, dilation=shape.dilation, groups=groups, bias=shape.bias
    )


class Basic(Residual):
    replearn_anatomy = replearn.anatomy(
        "mine", "basic", conv1="first", conv2="last", norm="norm", activation="activation"
    )

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.width)


class Bottleneck(Residual):
    replearn_anatomy = replearn.anatomy(
        "mine", "bottleneck", conv1="first", conv2="between", conv3="last", norm="norm", activation="activation"
    )

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.width // 2)


class Depthwise(nn.Module):
    """A block of a ConvNeXt's sort, which no family knows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.spread = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=shape.bias)
        self.norm = CONV_NORMS[shape.norm](width)
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))
        self.gain = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.body(self.norm(self.spread(x)))


class Attending(nn.Module):
    """Attention of a user's own, with fewer heads for keys and values, told by its anatomy."""

    replearn_anatomy = replearn.anatomy(
        "mine", "transformer", proj="proj", norm1="norm1", norm2="norm2", up="up", activation="act", down="down"
    )

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads, self.groups = shape.width, shape.heads, min(shape.groups, shape.heads)
        each = width // shape.heads
        self.query = nn.Linear(width, width, bias=shape.bias)
        self.key = nn.Linear(width, self.groups * each, bias=shape.bias)
        self.value = nn.Linear(width, self.groups * each, bias=shape.bias)
        self.proj = nn.Linear(width, width, bias=shape.bias)
        self.norm1, self.norm2 = TOKEN_NORMS[shape.norm](width), TOKEN_NORMS[shape.norm](width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=shape.bias)
        self.act = ACTIVATIONS[shape.activation]()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm1(x)

        def split(layer: nn.Linear, heads: int) -> Tensor:
            return layer(seen).unflatten(-1, (heads, -1)).transpose(1, 2)

        repeat = self.heads // self.groups
        key, value = (split(layer, self.groups).repeat_interleave(repeat, 1) for layer in (self.key, self.value))
        found = F.scaled_dot_product_attention(split(self.query, self.heads), key, value)
        x = x + self.proj(found.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return out


class Plain(nn.Module):
    """An MLP with a shortcut and a parameter of its own, which no family knows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = TOKEN_NORMS[shape.norm](shape.width)
        self.mix = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.drop = nn.Dropout(shape.dropout)
        self.gain = nn.Parameter(torch.ones(()))
        self.extra = nn.ParameterList([nn.Parameter(torch.zeros(shape.width))])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.gain * torch.tanh(self.mix(self.norm(x))) + self.extra[0])


class Recurrent(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.run = nn.GRU(shape.width, shape.width, batch_first=True, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(x)[0]


class Keyword(nn.Module):
    """Takes its input by name, beside a setting, and returns a tuple."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mix = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor]:
        return (hidden + scale * torch.tanh(self.mix(hidden)),)


def encoder_layer(shape: Shape) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width, shape.heads, 12, dropout=shape.dropout, norm_first=shape.norm_first, batch_first=True,
        bias=shape.bias, activation="relu" if shape.activation == "relu" else "gelu",
    )  # fmt: skip


BLOCKS: dict[str, Callable[[Shape], nn.Module]] = {
    "basic": Basic,
    "bottleneck": Bottleneck,
    "depthwise": Depthwise,
    "encoder": encoder_layer,
    "attending": Attending,
    "plain": Plain,
    "recurrent": Recurrent,
    "keyword": Keyword,
    "linear": lambda shape: nn.Linear(shape.width, shape.width, bias=shape.bias),
    "nothing": lambda shape: nn.Tanh(),
}


class Model(nn.Module):
    """Stacks of blocks in containers of several sorts, with an ordinary layer after them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.keyword = shape.block == "keyword"
        stacks = [[BLOCKS[shape.block](shape) for _ in range(shape.depth)] for _ in range(shape.twins)]
        kind = shape.container
        if kind == "attributes":
            for index, block in enumerate(block for stack in stacks for block in stack):
                setattr(self, f"block{index}", block)
            self.stacks: nn.Module = nn.ModuleList()
        elif kind == "dict":
            self.stacks = nn.ModuleDict({f"s{i}": nn.ModuleList(stack) for i, stack in enumerate(stacks)})
        elif kind == "nested" and not self.keyword:
            halves = [(stack[: len(stack) // 2], stack[len(stack) // 2 :]) for stack in stacks]
            self.stacks = nn.ModuleList(
                nn.ModuleList(nn.Sequential(*half) for half in pair if half) for pair in halves
            )
        elif kind == "stages" and not self.keyword:
            self.stacks = nn.Sequential(*(nn.Sequential(nn.Sequential(*stack)) for stack in stacks))
        elif kind == "mixed":
            self.stacks = nn.ModuleList(nn.ModuleList([nn.Identity(), *stack, nn.Tanh()]) for stack in stacks)
        else:
            self.stacks = nn.ModuleList(
                nn.ModuleList(stack) if kind == "list" or self.keyword else nn.Sequential(*stack)
                for stack in stacks
            )
        self.last = nn.GroupNorm(1, shape.width) if shape.images else nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        stacks = self.stacks.values() if isinstance(self.stacks, nn.ModuleDict) else self.stacks
        blocks = [block for stack in stacks for block in stack]
        blocks += [module for name, module in self._modules.items() if name.startswith("block")]
        for block in blocks:
            inner = self.keyword and not isinstance(block, (nn.Identity, nn.Tanh))
            x = block(hidden=x, scale=1.0)[0] if inner else block(x)
        out: Tensor = self.last(x)
        return out
