"""The blocks that PRACTISE takes out, as its authors' program chooses them for a ResNet.

Each block but the first of its stage is taken out alone. Adaptors, 1x1 convolutions that start as identities,
are put behind the last convolution of every block before it in the stage and behind the stage's shortcut, and
in front of the first convolution of every block after it and of the next stage's first block. They alone are
trained, by SGD at a rate of 0.02 that is divided by ten at 40 percent, on the error of the features before
pooling, with BatchNorm in eval mode. A block's score is the error that is left on all images, over the share of
latency that it saves. The least scores go, all at once. The authors train 2,000 steps for each block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from latency import interleaved
from practise import BATCH, batches, feature_error
from subjects import Subject
from torch import Tensor, nn
from training_free import main_layers, removal

import replearn

RATE = 0.02


def scores_of(subject: Subject, samples: Tensor, steps: int) -> dict[str, float]:
    """The score of every block that could go, in the order of the network."""
    stages = [list(stack.blocks) for stack in replearn.find_stacks(subject.model)]
    able = [name for stage in stages for name in stage[1:]]
    parts = [subject.taking_out([name]) for name in able]
    whole, *times = interleaved([subject.model, *map(removal, parts)], samples[:BATCH])
    scores = {}
    for name, part, now in zip(able, parts, times, strict=True):
        saved = max((whole - now) / whole, 1e-6)
        scores[name] = error_after_recovery(part, stages, samples, steps) / saved
        print(f"PRACTISE scored {name}: {scores[name]:.4g}", flush=True)
    return scores


def error_after_recovery(subject: Subject, stages: list[list[str]], samples: Tensor, steps: int) -> float:
    """The error that the adaptors around one block that is gone can't mend."""
    student = removal(subject).requires_grad_(False)
    adaptors = nn.ModuleList(put_adaptors(student, stages, subject.out[0])).to(samples.device)
    optimizer = torch.optim.SGD(adaptors.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, int(0.4 * steps)))
    for _, batch in zip(range(steps), batches(samples), strict=False):
        loss = feature_error(student, subject, batch if subject.augment is None else subject.augment(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        errors = [(feature_error(student, subject, part), len(part)) for part in samples.split(BATCH)]
    return float(sum(error * size for error, size in errors) / len(samples))


def put_adaptors(student: nn.Module, stages: list[list[str]], gone: str) -> Iterator[nn.Conv2d]:
    """Hang adaptors on the convolutions around a block that is gone."""
    number = next(at for at, stage in enumerate(stages) if gone in stage)
    stage, at = stages[number], stages[number].index(gone)
    for name in stage[:at]:
        yield behind(convolutions(student.get_submodule(name))[-1])
    for shortcut in shortcuts(student.get_submodule(stage[0])):
        yield behind(shortcut)
    for name in stage[at + 1 :]:
        yield before(convolutions(student.get_submodule(name))[0])
    for following in stages[number + 1 : number + 2]:
        block = student.get_submodule(following[0])
        for convolution in (convolutions(block)[0], *shortcuts(block)):
            yield before(convolution)


def behind(convolution: nn.Conv2d) -> nn.Conv2d:
    adaptor = identity(convolution.out_channels)
    convolution.register_forward_hook(lambda module, args, made: adaptor(made))
    return adaptor


def before(convolution: nn.Conv2d) -> nn.Conv2d:
    adaptor = identity(convolution.in_channels)
    convolution.register_forward_pre_hook(lambda module, args: adaptor(args[0]))
    return adaptor


def identity(channels: int) -> nn.Conv2d:
    adaptor = nn.Conv2d(channels, channels, 1, bias=False)
    with torch.no_grad():
        adaptor.weight.copy_(torch.eye(channels)[..., None, None])
    return adaptor


def convolutions(block: nn.Module) -> list[nn.Conv2d]:
    """Those of a block's branch, in order."""
    return [module for _, module in main_layers(block) if isinstance(module, nn.Conv2d)]


def shortcuts(block: nn.Module) -> list[nn.Conv2d]:
    own = set(convolutions(block))
    return [module for module in block.modules() if isinstance(module, nn.Conv2d) and module not in own]
