"""PRACTISE (Wang and Wu, CVPR 2023, arXiv 2202.07861), with the blocks that go given.

As the authors' fine-tuning: the student starts as the network without the blocks, all of it but the classifier is
trained for 2,000 steps on the mean squared error of the features before pooling, BatchNorm in train mode; SGD with
momentum 0.9 and weight decay 1e-4, batches of 64 with random crops and flips, the rate divided by ten at 40 and at
80 percent. Theirs is 0.02; here the best of three is taken by the error on held-out images after a whole training
on the others, once for a kind of network and number of images, and these seconds are not counted. The training
that counts takes all images.

Transformers, which the authors do not treat, are trained by AdamW on the last block's output.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from subjects import Subject
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from training_free import removal

STEPS = 2000
BATCH = 64
RATES = {True: (0.1, 0.02, 0.004), False: (1e-3, 3e-4, 1e-4)}  # of SGD for convolutional networks, of AdamW


def practise(
    subject: Subject, samples: Tensor, rate: float, *, steps: int = STEPS, seconds: float | None = None
) -> nn.Module:
    """The network without the blocks, trained for so many steps or seconds."""
    begin = time.perf_counter()
    student = removal(subject).train()
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # the teacher has none either
    parameters = [p for name, p in student.named_parameters() if name not in classifier(subject)]
    optimizer: torch.optim.Optimizer
    if subject.convolutional:
        optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=1e-4)
    for step, batch in enumerate(batches(samples)):
        share = step / steps if seconds is None else (time.perf_counter() - begin) / seconds
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * (1.0 if share < 0.4 else 0.1 if share < 0.8 else 0.01)
        images = batch if subject.augment is None else subject.augment(batch)
        loss = feature_error(student, subject, images)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if seconds is not None and images.is_cuda and step % 8 == 0:
            torch.cuda.synchronize()  # else the clock says when a step was asked for
    return student.eval()


def best_rate(subject: Subject, samples: Tensor, steps: int = STEPS) -> tuple[float, dict[str, float]]:
    """The rate with the least error on a fifth of the images after training on the others; all errors."""
    held = max(1, len(samples) // 5)
    errors = {}
    for rate in RATES[subject.convolutional]:
        student = practise(subject, samples[held:], rate, steps=steps)
        with torch.no_grad():
            errors[str(rate)] = float(feature_error(student, subject, samples[:held]))
    kept = {rate: error for rate, error in errors.items() if error == error}  # no NaN
    if not kept:
        raise RuntimeError(f"{subject.name}: PRACTISE diverged at every rate: {errors}.")
    return float(min(kept, key=kept.__getitem__)), errors


def batches(samples: Tensor) -> Iterator[Tensor]:
    """Epoch after epoch in a new order, the last part batch of an epoch left out."""
    size = min(BATCH, len(samples))
    while True:
        order = torch.randperm(len(samples)).to(samples.device)
        for begin in range(0, len(samples) - size + 1, size):
            yield samples[order[begin : begin + size]]


def feature_error(student: nn.Module, subject: Subject, images: Tensor) -> Tensor:
    with torch.no_grad():
        aim = features(subject.model, subject.last_block, images)
    return mse_loss(features(student, subject.last_block, images), aim)


def features(model: nn.Module, block: str, images: Tensor) -> Tensor:
    """What the last block makes: the features before pooling, or before a transformer's last norm."""

    def note(module: nn.Module, args: Any, made: Tensor) -> None:
        raise Reached(made)  # what follows is not trained, and a large vocabulary takes its time

    hook = model.get_submodule(block).register_forward_hook(note)
    try:
        model(images)
    except Reached as reached:
        return reached.features
    finally:
        hook.remove()
    raise RuntimeError(f"{block} did not run.")


class Reached(Exception):
    def __init__(self, features: Tensor) -> None:
        super().__init__("the last block has run")
        self.features = features


def classifier(subject: Subject) -> set[str]:
    """The parameters of the last linear layer; of a tied one, the embeddings' too."""
    layers = [module for module in subject.model.modules() if isinstance(module, nn.Linear)]
    mine = {id(parameter) for parameter in layers[-1].parameters()}
    return {name for name, p in subject.model.named_parameters() if id(p) in mine}
