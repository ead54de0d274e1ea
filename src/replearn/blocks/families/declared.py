"""Your own blocks, which declare their anatomy as a class attribute.

class MyBlock(nn.Module):
    replearn_anatomy = replearn.anatomy("mine", "basic", conv1="a", conv2="b", norm="n", ...)
"""

from dataclasses import replace

from torch import nn

from ...errors import ReplearnError
from ..anatomy import Anatomy, has_parts, shape_change


def describe(block: nn.Module) -> Anatomy | None:
    declared = getattr(block, "replearn_anatomy", None)
    if declared is None:
        return None
    if not isinstance(declared, Anatomy):
        raise ReplearnError(
            f"{type(block).__qualname__}.replearn_anatomy is a {type(declared).__name__}, "
            "not an Anatomy; write it with replearn.anatomy(...)."
        )
    for role, part in declared.parts.items():
        if not has_parts(block, part.path):
            raise ReplearnError(
                f"{type(block).__qualname__}.replearn_anatomy says {role}={part.path!r}, and the block has "
                "nothing there; write the path of that layer below the block, as 'attn.proj'."
            )
    if declared.kind in ("basic", "bottleneck") and not declared.transition:
        convs = [declared.parts[role].path for role in ("conv1", "conv2", "conv3") if role in declared.parts]
        return replace(declared, transition=shape_change(block, *convs))
    return declared
