"""Attention over few tokens, for which the tiles of flash attention are too long."""

from .layers import find_short, short_attention
from .operation import packed_attention
from .tiles import MOST_TOKENS

__all__ = ["MOST_TOKENS", "find_short", "packed_attention", "short_attention"]
