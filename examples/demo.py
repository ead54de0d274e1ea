"""Plan, replace, train a little, deploy: what was promised beside what is measured. Under a minute on one core.

The data are made here (stripes in noise), so nothing about accuracy follows from this run. It ends with an error
if a promise is broken.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import replearn

STEPS = 30
ROUNDS = 15


def made_images(count: int) -> tuple[Tensor, Tensor]:
    """Stripes of four directions in noise, and the number of the direction."""
    labels = torch.randint(4, (count,))
    angle = labels.view(-1, 1, 1) * torch.pi / 4
    y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    phase = torch.rand(count, 1, 1) * 2 * torch.pi
    stripes = torch.sin(x * angle.cos() + y * angle.sin() + phase)
    return stripes.unsqueeze(1) + 0.5 * torch.randn(count, 3, 16, 16), labels


def train(model: nn.Module) -> tuple[float, float]:
    """A few ordinary steps; the loss of the first one, and the mean of the last five."""
    optimizer = torch.optim.SGD(replearn.param_groups(model, weight_decay=1e-4), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        images, labels = made_images(64)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], statistics.mean(losses[-5:])


@torch.inference_mode()
def forward_times(models: dict[str, nn.Module], images: Tensor) -> dict[str, float]:
    """Each model's forward time as a share of the first one's: models take turns, the median round counts."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            begin = time.perf_counter()
            model(images)
            seconds[name].append(time.perf_counter() - begin)
    base = next(iter(seconds.values()))
    return {
        name: statistics.median(t / b for t, b in zip(times, base, strict=True)) for name, times in seconds.items()
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    original = replearn.models.resnet32(num_classes=4)

    plan = replearn.plan(original, interval=4)
    print(plan, "\n")

    model = replearn.replace_(copy.deepcopy(original), plan)
    first, last = train(model)
    print(f"{STEPS} steps on made images: loss {first:.2f} -> {last:.2f}\n")

    images, _ = made_images(128)
    plain = replearn.deploy(model.eval(), example=images)  # raises if the outputs differ by more than rounding
    original.eval()
    model.eval()

    counted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    operators = sum(type(module).__module__.startswith("replearn.operators") for module in plain.modules())
    with torch.inference_mode():
        expected, found = model(images), plain(images)
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    times = forward_times({"end-to-end": original, "replaced": model, "deployed": plain}, images)

    print(f"{'':38}{'promised':>12}{'measured':>12}")
    print(f"{'trainable parameters after replace_':38}{plan.parameters_after:>12,}{counted:>12,}")
    print(f"{'operators left after deploy':38}{0:>12}{operators:>12}")
    print(f"{'deployed output, relative difference':38}{'<= 1e-05':>12}{difference:>12.1e}")
    for name, ratio in times.items():
        print(f"{'forward time, ' + name:38}{'-':>12}{ratio:>12.2f}")
    print(f"\nForward times are ratios within this run: one core, {ROUNDS} rounds. A plan promises none yet.")

    if counted != plan.parameters_after or operators or difference > 1e-5 or last >= first:
        raise SystemExit("A promise was broken: see the table.")


if __name__ == "__main__":
    main()
