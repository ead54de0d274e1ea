"""The paper's language model, Transformer-LM-12L-512d-8H-2048ff: a decoder with learned positions.

The paper gives its depth, width, heads and MLP width alone. Ours, where it is silent: LayerNorm before each
branch, GELU, dropout 0.2 on embeddings and branches, GPT-2's starting values, the output tied to the embeddings.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention

from ..blocks.anatomy import Anatomy, anatomy
from ..errors import ReplearnError
from .linear_cross_entropy import IGNORED, linear_cross_entropy


class Attention(nn.Module):
    """Causal self-attention, in one fused kernel."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, dim: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    @property
    def replearn_anatomy(self) -> Anatomy:
        return anatomy(
            "transformer_lm",
            "transformer",
            num_heads=self.attn.num_heads,
            proj="attn.proj",
            norm1="norm1",
            norm2="norm2",
            up="up",
            activation="act",
            down="down",
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.down(self.act(self.up(self.norm2(x)))))


class TransformerLM(nn.Module):
    """A causal language model: numbers of words in, logits out; with targets, their mean cross-entropy.

    The loss of a training step never holds all logits at once. `tied=False` gives the output a matrix of its own.
    Raises ReplearnError for sequences longer than `max_length`, for anything but a (batch, length) of whole
    numbers, and for numbers outside of the vocabulary: the last on a CPU only, since a GPU would have to be
    waited for.

    >>> model = TransformerLM(num_words=100, dim=16, depth=4, num_heads=2, hidden=32, max_length=8)
    >>> model(torch.zeros(2, 8, dtype=torch.int64)).shape
    torch.Size([2, 8, 100])
    """

    def __init__(
        self,
        num_words: int,
        *,
        dim: int = 512,
        depth: int = 12,
        num_heads: int = 8,
        hidden: int = 2048,
        max_length: int = 128,
        dropout: float = 0.2,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if min(num_words, dim, depth, num_heads, hidden, max_length) < 1 or dim % num_heads:
            raise ReplearnError(
                f"A language model of width {dim} can't have {num_heads} heads, {depth} blocks, an MLP of "
                f"{hidden}, {max_length} positions and {num_words} words: all are at least 1, and the heads "
                "divide the width."
            )
        if not 0 <= dropout < 1:
            raise ReplearnError(f"dropout={dropout} is no share of what is dropped: write one from 0 to below 1.")
        self.words = nn.Embedding(num_words, dim)
        self.positions = nn.Embedding(max_length, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, num_heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_words, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, Block):  # what is added 2 x depth times starts smaller
                for layer in (module.attn.proj, module.down):
                    nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
        if tied:
            self.head.weight = self.words.weight

    @property
    def max_length(self) -> int:
        return self.positions.num_embeddings

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor:
        check_input(words, targets, self.words.num_embeddings, self.max_length)
        places = torch.arange(words.shape[1], device=words.device)
        x = self.dropout(self.words(words) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if targets is None else linear_cross_entropy(x, self.head.weight, targets)


def check_input(words: Any, targets: Any, num_words: int, max_length: int) -> None:
    """Refuse what a language model can't read; a flat graph, which is traced with a stand-in, holds no checks."""
    if isinstance(words, fx.Proxy):
        return
    check_words(words, "words", num_words)
    if words.shape[1] > max_length:
        raise ReplearnError(
            f"A sequence of {words.shape[1]} words is longer than the {max_length} positions of this language "
            f"model. Cut it, or build the model with max_length={words.shape[1]}."
        )
    if targets is None:
        return
    check_words(targets, "targets", num_words)
    if targets.shape != words.shape:
        raise ReplearnError(
            f"There is one target for each word: words of shape {tuple(words.shape)} can't have targets of shape "
            f"{tuple(targets.shape)}."
        )


def check_words(words: Any, what: str, num_words: int) -> None:
    """Refuse what is no batch of numbered words; the numbers too, where they can be read without waiting."""
    if not isinstance(words, Tensor) or words.dtype not in (torch.int64, torch.int32) or words.dim() != 2:
        shape = f"{words.dtype} of shape {tuple(words.shape)}" if isinstance(words, Tensor) else ""
        raise ReplearnError(
            f"The {what} of a language model are an int64 tensor of shape (batch, length), as "
            f"torch.tensor([[3, 1, 4]]); this is {shape or type(words).__name__}."
        )
    if not words.numel():
        raise ReplearnError(f"There are no {what} in a tensor of shape {tuple(words.shape)}.")
    later = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if later or type(words) is not Tensor or words.device.type != "cpu":
        return  # no values yet, or on a GPU
    read = torch.where(words == IGNORED, 0, words) if what == "targets" else words
    low, high = (int(number) for number in read.aminmax())
    if low < 0 or high >= num_words:
        raise ReplearnError(
            f"The {what} hold the number {low if low < 0 else high}, and the vocabulary of this model has "
            f"{num_words:,} words, 0 to {num_words - 1}. Number the text with the vocabulary that the model was "
            "trained with, or build the model for this one (num_words=)."
        )
