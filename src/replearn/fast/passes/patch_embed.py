"""Join a transformer's first layer in a flat graph, from images to tokens, where a kernel of ours computes it.

conv2d -> flatten -> transpose -> cat with the class token -> add positions, as timm and torchvision write it, with
patches that do not overlap. What depends on no image becomes one table of rows that are added to the tokens.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph_module import FlatGraph, held, is_sum, uses
from ..inlining import argument, drop_unused_
from ..kernels.patch_embed import can_be_cut, embed

CONVOLUTIONS = (torch.conv2d, F.conv2d)
SWAPS = {"transpose": ((1, 2), (2, 1), (-1, -2), (-2, -1)), "permute": ((0, 2, 1),)}
ONE = (1, (1, 1), [1, 1], None)
NONE = (0, (0, 0), [0, 0], "valid", None)


def embed_patches_(flat: FlatGraph) -> None:
    """Put one operation in the place of the first layer, in place; where it is another, nothing changes.

    `note_values_` comes first, under the autocast which the graph will run under.
    """
    for total in [node for node in flat.graph.nodes if is_sum(node)]:
        for joined, positions in (total.args, total.args[::-1]):
            if write_(flat, total, joined, held(flat, positions)):
                drop_unused_(flat)
                return


@torch.no_grad()
def write_(flat: FlatGraph, total: Any, joined: Any, positions: Tensor | None) -> bool:
    """Replace `total`, the sum of tokens and positions, if the tokens are those of patches."""
    if positions is None or joined.target is not torch.cat or len(joined.users) > 1:
        return False
    parts, dim = argument(joined, 0, "tensors"), argument(joined, 1, "dim")
    if dim != 1 or len(parts) != 2 or parts[0].target != "expand":
        return False
    token, convolution = held(flat, parts[0].args[0]), convolution_before(parts[1])
    weight = None if convolution is None else patch_weight(flat, convolution)
    if token is None or weight is None or total.meta.get("value") is None:
        return False
    width, first = len(weight), parts[0].meta["value"].shape[1]
    rows = (1, *total.meta["value"].shape[1:])
    kinds = {total.meta["value"].dtype, positions.dtype, token.dtype, weight.dtype}
    if positions.shape != rows or token.shape != (1, first, width) or kinds != {torch.float32}:
        return False
    added = argument(convolution, 2, "bias")
    shift = token.new_zeros(width) if added is None else held(flat, added)
    if shift is None:  # one that the model's code computes
        return False
    table = positions[0] + torch.cat((token[0], shift.expand(rows[1] - first, -1)))
    name = str(argument(convolution, 1, "weight").target)
    with flat.graph.inserting_before(total):
        stored = [kept(flat, f"{name}_{role}", tensor) for role, tensor in (("patches", weight), ("table", table))]
        stored[0].meta["cast"] = True  # once, as autocast would at every call
        made = flat.graph.call_function(embed, (argument(convolution, 0, "input"), *stored, first))
    for node in (parts[1], parts[1].args[0], convolution):
        for user in [user for user in node.users if asks_for_batch(user)]:
            user.replace_input_with(node, argument(convolution, 0, "input"))
    made.meta["value"] = total.meta["value"]
    total.replace_all_uses_with(made)
    flat.graph.erase_node(total)
    return True


def convolution_before(tokens: Any) -> Any:
    """The convolution whose pixels these tokens are, one after another, if nobody else sees what is in between."""
    if tokens.op != "call_method" or tuple(tokens.args[1:]) not in SWAPS.get(str(tokens.target), ()):
        return None
    row = tokens.args[0]
    if row.op != "call_method" or row.target not in ("flatten", "reshape", "view"):
        return None
    pixels = row.args[0]
    value, image = row.meta.get("value"), pixels.meta.get("value")
    if (
        value is None
        or image is None
        or image.dim() != 4
        or value.shape != (*image.shape[:2], image[0, 0].numel())
    ):
        return None
    return pixels if all(len(seers(node)) == 1 for node in (tokens, row)) else None


def seers(node: fx.Node) -> list[fx.Node]:
    """Who uses a value, but for those who ask how many images it is of."""
    return [user for user in node.users if not asks_for_batch(user)]


def asks_for_batch(user: fx.Node) -> bool:
    shape = user.target is getattr and user.args[1] == "shape"
    return shape and all(one.target is operator.getitem and one.args[1] == 0 for one in user.users)


def patch_weight(flat: FlatGraph, convolution: Any) -> Tensor | None:
    """The weight of a convolution whose windows lie side by side, if our kernel can compute it."""
    if convolution.op != "call_function" or convolution.target not in CONVOLUTIONS or convolution.kwargs:
        return None
    _, node, _, stride, padding, dilation, groups = (*convolution.args, *[None] * 7)[:7]
    weight, image = held(flat, node), argument(convolution, 0, "input").meta.get("value")
    if weight is None or image is None or weight.dim() != 4 or not can_be_cut(weight) or uses(flat, node) > 1:
        return None
    sides = tuple(weight.shape[2:])
    steps = (stride, stride) if isinstance(stride, int) else tuple(stride or (1, 1))
    whole = all(size % side == 0 for size, side in zip(image.shape[2:], sides, strict=True))
    plain = padding in NONE and dilation in ONE and groups in (1, None) and len(seers(convolution)) == 1
    return weight if steps == sides and whole and plain else None


def kept(flat: FlatGraph, name: str, tensor: Tensor) -> fx.Node:
    flat.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=trained(flat)))
    return flat.graph.get_attr(name)


def trained(flat: FlatGraph) -> bool:
    return any(parameter.requires_grad for parameter in flat.parameters())
