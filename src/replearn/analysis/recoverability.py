"""Recoverability: the distance of the removed weights to the span of their neighbours'."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..blocks.anatomy import Part, resolve
from ..operators._base.ridge import damped_solve
from ..operators._base.synthesis import Source
from ..planning.data import Target
from .results import Distance


@torch.no_grad()
def distances(model: nn.Module, target: Target) -> tuple[Distance, ...]:
    """The distance of every kernel and matrix of a block to the same ones of its neighbours, where shapes agree.

    A BasicBlock's two kernels are also compared with what the paper's operator mixes: the previous block's second
    and the next block's first kernel.
    """
    roles = [role for role in target.anatomy.parts if role not in ("activation", "norm", "norm1", "norm2")]
    if not roles:  # the anatomy names no parts: every parameter of the block
        roles = [name for name, _ in model.get_submodule(target.name).named_parameters()]
    pairs = [(role, role, role) for role in roles]
    if target.anatomy.kind == "basic":
        pairs += [(role, "conv2", "conv1") for role in ("conv1", "conv2")]
    found = []
    for role, before, after in pairs:
        own = _weight(model, target.name, role, target)
        spans = {
            f"previous.{before}": _weight(model, target.previous, before, target),
            f"next.{after}": _weight(model, target.next, after, target),
        }
        sides = {name: weight for name, weight in spans.items() if weight.shape == own.shape}
        if own.dim() >= 2 and sides:
            heads = target.anatomy.num_heads if role == "proj" else 0
            found.append(_distance(role, " + ".join(sides), own, list(sides.values()), heads))
    return tuple(found)


def _weight(model: nn.Module, name: str, role: str, target: Target) -> Tensor:
    """A block's weight as (out, in, ...) in float64."""
    part = target.anatomy.parts.get(role, Part(role))
    block = model.get_submodule(name)
    found = resolve(block, part.path)
    if isinstance(found, Tensor):
        return found.double()
    return Source(block, part, stop_gradient=True).weight().double()


def _distance(role: str, span: str, own: Tensor, sides: Sequence[Tensor], heads: int) -> Distance:
    flat, spans = own.flatten(1), [side.flatten(1) for side in sides]
    rows = _left(flat, spans)
    whole = float(_left(flat.reshape(1, -1), [side.reshape(1, -1) for side in spans])[0])
    size = float(flat.norm()) or 1.0
    by_head: tuple[float, ...] = ()
    if heads > 1 and flat.shape[1] % heads == 0:  # a head's part of the output projection are its columns
        parts = [tensor.chunk(heads, dim=1) for tensor in (flat, *spans)]
        by_head = tuple(
            float(_left(mine.reshape(1, -1), [o.reshape(1, -1) for o in others])[0] / mine.norm().clamp_min(1e-30))
            for mine, *others in zip(*parts, strict=True)
        )
    return Distance(
        role=role,
        span=span,
        whole=whole / size,
        absolute=whole,
        rows=float(rows.norm()) / size,
        best_row=float((rows / flat.norm(dim=1).clamp_min(1e-30)).min()),
        heads=by_head,
        chance=max(0.0, 1 - len(sides) / flat.shape[1]) ** 0.5,
    )


def _left(rows: Tensor, spans: Sequence[Tensor]) -> Tensor:
    """The norm of each row minus its projection onto the span of the same rows of the others."""
    basis = torch.stack(list(spans), dim=1)  # (rows, sides, n)
    found = damped_solve(basis @ basis.mT, (basis @ rows[:, :, None])[..., 0])
    return (rows - (found[:, :, None] * basis).sum(1)).norm(dim=1)
