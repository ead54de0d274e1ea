"""Have the LayerNorms of a flat graph write what the linear layers after them read: half precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from ..graph_module import FlatGraph
from ..inlining import argument
from ..kernels.layernorm_half import rounded_norm

FEW = 1024 * 384  # numbers that wait for Python and not for the GPU


def round_norms_(flat: FlatGraph, *, few: bool) -> None:
    """Put a norm that rounds in the place of each one that goes into linear layers alone, in place.

    `note_values_` comes first, under the autocast which the graph will run under. Launching a kernel of ours takes
    Python longer than torch's norm does: where an example is so small that this counts, norms stay, unless `few`
    are wanted too. So does the norm of a token that was picked, whose rows lie apart.
    """
    for node in flat.graph.find_nodes(op="call_function", target=torch.layer_norm):
        value = node.meta.get("value")
        if value is None or value.dtype is not torch.float32 or (value.numel() <= FEW and not few):
            continue
        if node.args[0].meta["value"].is_contiguous() and all(rounds(user, node) for user in node.users):
            node.target = rounded_norm
    flat.recompile()


def rounds(user: fx.Node, node: fx.Node) -> bool:
    """Does this use cast the value, or ask for its shape alone?"""
    if user.target is getattr:
        return user.args[1] == "shape"
    layer = user.op == "call_function" and user.target is F.linear and argument(user, 0, "input") is node
    return layer and node not in (argument(user, 1, "weight"), argument(user, 2, "bias"))
