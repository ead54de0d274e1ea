"""Patch embedding of a vision transformer as one operation, under autocast.

conv2d -> flatten -> transpose -> cat with the class token -> add positions, as timm and torchvision write it, with
patches that do not overlap. All that does not depend on the image becomes a table that is added to the tokens.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, is_sum, uses
from ..inlining import argument, drop_unused_
from ..kernels.patch_embed import can_tile, patch_embed
from ._context import Context, has_triton
from ._nodes import add_parameter, is_conv2d, sizes_of

AFTER = ("stem",)
SWAPS = {"transpose": ((1, 2), (2, 1), (-1, -2), (-2, -1)), "permute": ((0, 2, 1),)}


def apply_(flat: FlatGraph, context: Context) -> int:
    if context.dtype is None or context.compile or not has_triton(flat):
        return 0
    for total in [node for node in flat.graph.nodes if is_sum(node)]:
        for joined, positions in (total.args, total.args[::-1]):
            if fuse_(flat, total, joined, held(flat, positions)):
                drop_unused_(flat)
                return 1
    return 0


def example() -> tuple[nn.Module, Tensor]:
    """A model and its input on which the pass applies, for tests."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 64, 8, stride=8)
            self.token, self.positions = nn.Parameter(torch.randn(1, 1, 64)), nn.Parameter(torch.randn(1, 5, 64))

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.conv(x).flatten(2).transpose(1, 2)
            return torch.cat((self.token.expand(x.shape[0], -1, -1), tokens), dim=1) + self.positions

    return Tokens(), torch.randn(3, 3, 16, 16)


@torch.no_grad()
def fuse_(flat: FlatGraph, total: Any, joined: Any, positions: Tensor | None) -> bool:
    """Replace `total`, the sum of tokens and positions, if the tokens are those of patches."""
    if positions is None or joined.target is not torch.cat or len(joined.users) > 1:
        return False
    parts, dim = argument(joined, 0, "tensors"), argument(joined, 1, "dim")
    if dim != 1 or len(parts) != 2 or parts[0].target != "expand":
        return False
    token, conv = held(flat, parts[0].args[0]), convolution_before(parts[1])
    weight = None if conv is None else patch_weight(flat, conv)
    if token is None or weight is None or total.meta.get("value") is None:
        return False
    width, first = len(weight), parts[0].meta["value"].shape[1]
    rows = (1, *total.meta["value"].shape[1:])
    dtypes = {total.meta["value"].dtype, positions.dtype, token.dtype, weight.dtype}
    if positions.shape != rows or token.shape != (1, first, width) or dtypes != {torch.float32}:
        return False
    bias = argument(conv, 2, "bias")
    shift = token.new_zeros(width) if bias is None else held(flat, bias)
    if shift is None:  # the model's code computes it
        return False
    table = positions[0] + torch.cat((token[0], shift.expand(rows[1] - first, -1)))
    name, images = str(argument(conv, 1, "weight").target), argument(conv, 0, "input")
    with flat.graph.inserting_before(total):
        patches = add_parameter(flat, f"{name}_patches", weight, cast=True)
        given = (images, patches, add_parameter(flat, f"{name}_table", table), first)
        made = flat.graph.call_function(patch_embed, given)
    for node in (parts[1], parts[1].args[0], conv):
        for user in [user for user in node.users if reads_batch_size(user)]:
            user.replace_input_with(node, images)
    made.meta["value"] = total.meta["value"]
    total.replace_all_uses_with(made)
    flat.graph.erase_node(total)
    return True


def convolution_before(tokens: Any) -> Any:
    """The convolution whose pixels become these tokens, if nothing else reads what is in between."""
    if tokens.op != "call_method" or tuple(tokens.args[1:]) not in SWAPS.get(str(tokens.target), ()):
        return None
    row = tokens.args[0]
    if row.op != "call_method" or row.target not in ("flatten", "reshape", "view"):
        return None
    conv = row.args[0]
    value, image = row.meta.get("value"), conv.meta.get("value")
    if value is None or image is None or image.dim() != 4:
        return None
    if value.shape != (*image.shape[:2], image[0, 0].numel()):
        return None
    return conv if all(len(readers(node)) == 1 for node in (tokens, row)) else None


def readers(node: fx.Node) -> list[fx.Node]:
    """The users of a value, but for those that read its batch size."""
    return [user for user in node.users if not reads_batch_size(user)]


def reads_batch_size(user: fx.Node) -> bool:
    shape = user.target is getattr and user.args[1] == "shape"
    return shape and all(one.target is operator.getitem and one.args[1] == 0 for one in user.users)


def patch_weight(flat: FlatGraph, conv: Any) -> Tensor | None:
    """The weight of a convolution whose stride is its kernel size, if the kernel's tiles cover it."""
    if not is_conv2d(flat, conv):
        return None
    node = argument(conv, 1, "weight")
    weight, image = held(flat, node), argument(conv, 0, "input").meta.get("value")
    if weight is None or image is None or weight.dim() != 4 or not can_tile(weight) or uses(flat, node) > 1:
        return None
    whole = all(size % side == 0 for size, side in zip(image.shape[2:], weight.shape[2:], strict=True))
    apart = sizes_of(conv) == (tuple(weight.shape[2:]), (0, 0), (1, 1))
    return weight if apart and whole and len(readers(conv)) == 1 else None
