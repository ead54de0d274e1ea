"""Skip-Attention (Venkataramanan et al. 2024): the middle blocks of a ViT compute no attention.

    A_l = [cls of A_2; f_l(patches of A_{l-1})]                  (l = 3 ... 8 of 12 blocks, counted from 0)
    X_l = X + A_l, then the MLP branch as before
    f   = Linear d -> 2d, GELU, depth-wise 5x5 on the token grid, GELU, Linear 2d -> d,
          then each channel times sigmoid(conv of size 3 over the channels' means)

A_2 is what block 2's attention gives. The skipped blocks' attention and first norm are deleted, so
they save attention, and add f. For another depth n the blocks round(3n/12) ... round(9n/12) - 1 skip.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....blocks.anatomy import is_a
from ....errors import ReplearnError
from .base import Method

MODEL = "timm.models.vision_transformer.VisionTransformer"
BLOCK = "timm.models.vision_transformer.Block"
PARTS = ("ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2")  # what every block keeps


class SkipAttention(Method):
    name = "skip_attention"

    def prepare(self, model: nn.Module) -> nn.Module:
        check_model(model)
        plain = model.get_submodule("blocks")
        blocks = list(plain.children())
        skipped = skipped_blocks(len(blocks))
        for index in (skipped.start - 1, *skipped):
            blocks[index] = CarryingBlock(blocks[index], Reuse(model) if index in skipped else None)
        model.add_module("blocks", CarryingBlocks(*blocks).train(plain.training))
        return model


def skipped_blocks(depth: int) -> range:
    """The blocks that skip attention, counted from 0: the middle half, after the first quarter."""
    return range(round(depth * 3 / 12), round(depth * 9 / 12))


class CarryingBlocks(nn.Sequential):
    """The blocks of a ViT in order; carries the attention output from block to block."""

    def forward(self, x: Tensor) -> Tensor:
        attention: Tensor | None = None
        for block in self:
            if isinstance(block, CarryingBlock):
                x, attention = block(x, attention)
            else:
                x = block(x)
        return x


class CarryingBlock(nn.Module):
    """A timm block that also returns its attention output; with `reuse` it is computed from the previous block's.

    The parts of the block keep their names.
    """

    def __init__(self, block: nn.Module, reuse: nn.Module | None = None) -> None:
        super().__init__()
        weight = next(block.get_submodule("attn").parameters())
        self.reuse = None if reuse is None else reuse.to(device=weight.device, dtype=weight.dtype)
        for name in PARTS if reuse is not None else ("norm1", "attn", *PARTS):
            self.add_module(name, block.get_submodule(name))
        self.train(block.training)

    def forward(self, x: Tensor, attention: Tensor | None = None) -> tuple[Tensor, Tensor]:
        own: Any = self
        if self.reuse is None:
            made: Tensor = own.attn(own.norm1(x))
        elif attention is None:
            raise ReplearnError(
                "A block that skips attention was called on its own, without the attention output of the block "
                "before. Call the model, or model.blocks as a whole; instead of set_grad_checkpointing write the "
                "method 'skip_attention+checkpointing'."
            )
        else:
            made = self.reuse(attention)
        x = x + own.drop_path1(own.ls1(made))
        return x + own.drop_path2(own.ls2(own.mlp(own.norm2(x)))), made


class Reuse(nn.Module):
    """f: a block's attention output, computed from the previous block's; prefix tokens are unchanged."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.grid: tuple[int, int] = model.patch_embed.grid_size
        self.prefix: int = model.num_prefix_tokens
        width = model.embed_dim
        self.up = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 5, padding=2, groups=2 * width)
        self.down = nn.Linear(2 * width, width)
        self.channels = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.activation = nn.GELU()

    def forward(self, attention: Tensor) -> Tensor:
        kept, patches = attention[:, : self.prefix], attention[:, self.prefix :]
        y = self.activation(self.up(patches))
        y = y.transpose(1, 2).unflatten(2, self.grid)
        y = self.activation(self.depthwise(y)).flatten(2).transpose(1, 2)
        y = self.down(y)
        y = y * self.channels(y.mean(dim=1, keepdim=True)).sigmoid()
        return torch.cat((kept.to(y.dtype), y), dim=1)


def check_model(model: Any) -> None:
    """Raise unless the model is a ViT that can skip attention."""
    name = type(model).__name__
    classes = {f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__}
    blocks = getattr(model, "blocks", None)
    if MODEL not in classes or not isinstance(blocks, nn.Sequential):
        raise ReplearnError(
            f"skip_attention: {name} is not a timm VisionTransformer. Skip-Attention reuses a ViT's attention on "
            "its token grid; take a timm ViT (as vit_tiny_patch16_224), or another method for this model."
        )
    strange = [type(block).__name__ for block in blocks if not is_a(block, BLOCK)]
    if strange:
        raise ReplearnError(
            f"skip_attention: this {name} has a {strange[0]} among its blocks, and only timm's plain Block can "
            "skip its attention. Start from a fresh model with block_fn=Block."
        )
    skipped = skipped_blocks(len(blocks))
    if skipped.start < 1 or not len(skipped):
        raise ReplearnError(
            f"skip_attention: this {name} has {len(blocks)} blocks, too few to have one before those that skip. "
            "Take at least 3."
        )
    grid = getattr(model.patch_embed, "grid_size", None)
    if grid is None or getattr(model, "dynamic_img_size", False) or not isinstance(model.patch_drop, nn.Identity):
        raise ReplearnError(
            f"skip_attention: the token grid of this {name} changes or has holes (dynamic_img_size, "
            "patch_drop_rate or no img_size), and the 5x5 convolution needs a fixed one. Build it with "
            "img_size=..., dynamic_img_size=False and patch_drop_rate=0."
        )
