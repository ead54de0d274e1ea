"""Distributed training under torchrun, and Ctrl-C in all processes at the same step."""

import atexit
import gc
import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

EVERY = 10  # steps between two checks of many processes for Ctrl-C


@dataclass(frozen=True)
class Processes:
    """This process among all: (0, 1) where torchrun did not start us."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """True for the process that writes files and prints."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This process's equal part of a global batch."""
        return batch.chunk(self.world)[self.rank]

    def total(self, sums: Tensor) -> Tensor:
        """Sums of metrics added up over all processes."""
        if self.world > 1:
            dist.all_reduce(sums)
        return sums

    def agree(self, answer: bool, device: torch.device) -> bool:
        """The first process's answer, in all processes, for decisions that depend on a clock."""
        if self.world == 1:
            return answer
        flag = torch.tensor([float(answer)], device=device)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    def wrap(self, model: nn.Module, device: torch.device, leaves_idle: bool = False) -> nn.Module:
        """The model in DistributedDataParallel, if there are several processes."""
        if self.world == 1:
            return model
        if device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=leaves_idle,
        )


def start_processes(device: torch.device) -> Processes:
    """Join the process group that torchrun set up, if it did."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Processes()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(leave)
    return Processes(dist.get_rank(), world)


def leave() -> None:
    """Leave the process group: threads of its backend that outlive the interpreter would abort the process."""
    if dist.is_initialized():
        gc.collect()  # wrapped models in reference cycles refer to the group
        dist.destroy_process_group()


class Interruption:
    """Delays a Ctrl-C (or a scheduler's SIGTERM) to the end of the step; a second one stops at once."""

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self.processes, self.device = processes, device
        self.asked = False
        self._steps = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # signals reach it alone
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was asked for, in every process alike; call it between steps."""
        asked = self.asked
        if self.processes.world > 1:
            self._steps += 1
            if self._steps % EVERY:
                return
            flag = torch.tensor([float(asked)], device=self.device)
            asked = bool(self.processes.total(flag).item())
        if asked:
            raise KeyboardInterrupt
