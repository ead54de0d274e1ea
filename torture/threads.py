"""Several threads in one process: some deploy, some run replaced models, some run models of their own.

    python -m torture.threads

Each case has four threads that plan, replace and deploy, two that call a model that nobody replaced, two that
share one replaced model, and one that copies it and reads its state dict. None may raise, outputs are those of one
thread, and torch and its switches are left as they were.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable

import torch
from torch import nn

import replearn
from replearn import operators

from .ledger import open_ledger

KINDS = ("basic", "whole_block", "no_weights", "removal")


def errors_of(jobs: list[Callable[[], None]]) -> list[str]:
    found: list[str] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            found.append(f"{type(error).__name__}: {str(error)[:200]}")

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def replaced(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = replearn.models.CifarResNet(20, width=4)
    options = operators.available()[kind]()
    return replearn.replace_(model, replearn.plan(model, interval=2, first=2, operator=options)).eval()


def switches() -> tuple[object, ...]:
    """What deploying changes for a while in the whole process."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    precision = torch.get_float32_matmul_precision(), matmul.fp32_precision, cudnn.allow_tf32, cudnn.benchmark
    return (*precision, nn.Module.__call__, nn.Module.__getattr__, torch.arange, torch.full)


def trial(seed: int) -> list[str]:
    kind, x = KINDS[seed % len(KINDS)], torch.randn(2, 3, 16, 16)
    known = switches()
    models, shared = [replaced(kind, seed + number) for number in range(4)], replaced(kind, seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    given = torch.arange(6.0).view(2, 3)
    with torch.no_grad():
        right, own = shared(x), net(given)
    left = [len(models)]

    def deploy(model: nn.Module) -> None:
        try:
            replearn.deploy(model, x, flatten=True, merge=bool(seed % 2))
        finally:
            left[0] -= 1

    @torch.no_grad()
    def call(model: nn.Module, on: torch.Tensor, expected: torch.Tensor) -> None:
        while left[0] > 0:
            if not torch.equal(model(on), expected):
                raise RuntimeError("another output than in one thread")

    keys = list(shared.state_dict())

    def look() -> None:
        while left[0] > 0:
            if list(copy.deepcopy(shared).state_dict()) != keys or list(shared.state_dict()) != keys:
                raise RuntimeError("a copy or a state dict of a running model holds something else")

    jobs: list[Callable[[], None]] = [lambda model=model: deploy(model) for model in models]  # type: ignore[misc]
    jobs += [lambda: call(net, given, own)] * 2 + [lambda: call(shared, x, right)] * 2 + [look]
    found = errors_of(jobs)
    if known != switches():
        found.append("torch was left patched")
    return found


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ledger = open_ledger("threads", total=100, seconds=300, threads=9)
    while ledger.open:
        for fault in trial(ledger.done):
            ledger.note("faults", f"seed {ledger.done}: {fault}")
        ledger.count("cases", KINDS[ledger.done % len(KINDS)])
        ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
