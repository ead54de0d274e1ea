"""Peers that take no gradient step: removal, removal with BatchNorm re-estimated, and ReplaceMe.

ReplaceMe (Shopkhoev et al., 2025, arXiv 2505.02819): for a span of blocks that go, one linear map T of the MLP's
output M in the block before the span, so that M T plus the residual stream there is the residual stream behind the
span; ordinary least squares on the untouched network's activations, T merged into the MLP's last layer. Several
spans are fitted at once. Here T has an intercept where the layer has a bias that can take it, which can only help.

For a ResNet M is the residual branch behind its last BatchNorm, T a 1x1 convolution that is folded into that
convolution and BatchNorm, and the aim is the sum before the removed block's ReLU.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from subjects import Subject
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import replearn

BATCH = 250  # of samples; the activations of one are held


class PassThrough(nn.Module):
    """Stands where a removed block stood."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def removal(subject: Subject) -> nn.Module:
    """A copy of the network without the blocks."""
    made = copy.deepcopy(subject.model)
    for name in subject.out:
        made.set_submodule(name, PassThrough())
    return made


def reestimate_(model: nn.Module, samples: Tensor) -> nn.Module:
    """BatchNorm statistics of the network as it is now, in place."""
    with torch.no_grad():
        update_bn(samples.split(BATCH), model)
    return model


@torch.no_grad()
def replace_me(subject: Subject, samples: Tensor) -> nn.Module:
    """One map for each span of blocks that go, merged into the block before the span."""
    made = removal(subject)
    for before, (weight, bias) in fitted(subject, samples).items():
        merge_(made.get_submodule(before), weight, bias)
    return made


def spans(subject: Subject) -> list[tuple[str, str]]:
    """For every span of adjacent blocks that go: the block before it, and its last block."""
    found = []
    for name in subject.out:
        if neighbour(name, 1) not in subject.out:
            before = neighbour(name, -1)
            while before in subject.out:
                before = neighbour(before, -1)
            found.append((before, name))
    return found


def neighbour(name: str, step: int) -> str:
    """The name of another block of the same nn.Sequential or nn.ModuleList."""
    parent, _, number = name.rpartition(".")
    return f"{parent}.{int(number) + step}"


@torch.no_grad()
def own_span(subject: Subject, samples: Tensor) -> Subject:
    """As many adjacent blocks as the authors would take: where cosine distance across them is least."""
    names = list(replearn.find_stacks(subject.model)[0].blocks)
    number = len(subject.out)
    distances = torch.zeros(len(names) - number)  # the first block stays: a map is merged into the one before
    for batch in samples.split(BATCH):
        seen = record(subject.model, names, batch)
        for begin in range(1, len(names) - number + 1):
            before, behind = seen[names[begin]][0], seen[names[begin + number - 1]][1]
            distances[begin - 1] += (1 - nn.functional.cosine_similarity(before, behind, dim=-1)).mean().cpu()
    begin = 1 + int(distances.argmin())
    return subject.taking_out(names[begin : begin + number])


def fitted(subject: Subject, samples: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """For the block before every span: T, a matrix (out, in), and its intercept, by least squares in float64."""
    model = subject.model
    found = spans(subject)
    blocks = {name: model.get_submodule(name) for pair in found for name in pair}
    branches = {name: f"{name}.{branch_of(block)}" for name, block in blocks.items()}
    moments: dict[str, Tensor] = {}
    for batch in samples.split(BATCH):
        seen = record(model, [*blocks, *branches.values()], batch)
        for before, last in found:
            rest, branch = rest_and_branch(blocks[before], seen[before], seen[branches[before]][1])
            behind = sum(rest_and_branch(blocks[last], seen[last], seen[branches[last]][1]))
            x, aim = rows(branch), rows(behind - rest)
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
            now = (x.T @ torch.cat([x, aim], 1)).cpu()
            moments[before] = moments[before] + now if before in moments else now
    solved = {}
    for before, sums in moments.items():
        size = len(sums)
        map_ = torch.linalg.lstsq(sums[:, :size], sums[:, size:], driver="gelsd").solution.T
        solved[before] = map_[:, :-1], map_[:, -1]
    return solved


def rest_and_branch(block: nn.Module, seen: tuple[Tensor, Tensor], branch: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of a block's last sum, before the activation behind it, if there is one."""
    given, made = seen
    if branch.dim() != 4:
        return made - branch, branch
    way = getattr(block, "shortcut", None) or getattr(block, "downsample", None)
    return (given if way is None else way(given)), branch


def branch_of(block: nn.Module) -> str:
    """The layer whose output is added last: a linear layer, or the BatchNorm behind a convolution."""
    kinds = (nn.BatchNorm2d,) if any(isinstance(m, nn.BatchNorm2d) for m in block.modules()) else (nn.Linear,)
    return [name for name, module in main_layers(block) if isinstance(module, kinds)][-1]


def main_layers(block: nn.Module) -> list[tuple[str, nn.Module]]:
    return [pair for pair in block.named_modules() if not pair[0].startswith(("shortcut", "downsample"))]


def merge_(block: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """The map after the block's branch, as part of the branch's last layer."""
    name = branch_of(block)
    layer: Any = block.get_submodule(name)
    if isinstance(layer, nn.Linear):
        layer.weight.copy_(weight @ layer.weight.cpu().double())
        if layer.bias is not None:
            layer.bias.copy_(weight @ layer.bias.cpu().double() + bias)
        return
    conv: Any = [m for _, m in main_layers(block) if isinstance(m, nn.Conv2d)][-1]
    variance, mean = layer.running_var.cpu().double(), layer.running_mean.cpu().double()
    scale = layer.weight.cpu().double() / (variance + layer.eps).sqrt()
    mixing = weight * scale
    conv.weight.copy_(torch.einsum("oc,cihw->oihw", mixing, conv.weight.cpu().double()))
    layer.bias.copy_(weight @ (layer.bias.cpu().double() - scale * mean) + bias)
    layer.weight.fill_((1 + layer.eps) ** 0.5)
    layer.running_mean.zero_()
    layer.running_var.fill_(1.0)


def rows(values: Tensor) -> Tensor:
    """Pixels or tokens as rows of channels."""
    flat = values.movedim(1, -1) if values.dim() == 4 else values
    return flat.flatten(0, -2).double()


def record(model: nn.Module, names: Sequence[str], batch: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What modules are given and make in one run; copied, since a sum or ReLU behind may write over it."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = []
    for name in names:

        def note(module: nn.Module, args: Any, made: Tensor, name: str = name) -> None:
            seen[name] = (args[0].clone(), made.clone())

        hooks.append(model.get_submodule(name).register_forward_hook(note))
    try:
        model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
