"""Offloading: weights are copied to the device block by block, samples batch by batch.

Without a device and a folder nothing is moved.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import ReplearnError

MIN_FILE_BYTES = 1 << 16  # smaller tensors stay in memory


@dataclass(slots=True)
class Transfers:
    """Bytes of weights on the device, now and at the peak, and the seconds spent on copies."""

    now: int = 0
    peak: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Offloader:
    """Copies weights and samples to a device while they are used; stores activations on the CPU or in a folder."""

    device: torch.device | None = None
    folder: Path | None = None
    blocks: tuple[str, ...] = ()
    transfers: Transfers = field(default_factory=Transfers)
    on_device: set[int] = field(default_factory=set)  # ids of the weights there

    def store(self, value: Any) -> Any:
        """Tensors moved to the CPU, or to files in the folder; unchanged without offloading."""
        if self.device is None:
            return value
        return tree_map_only(Tensor, self._stored, value)

    def _stored(self, tensor: Tensor) -> Tensor:
        if self.folder is None or tensor.nbytes < MIN_FILE_BYTES:
            return tensor.cpu()
        return memory_mapped_copy(tensor, self.folder)

    def load(self, value: Any) -> Any:
        """Tensors moved to the device."""
        if self.device is None:
            return value
        return tree_map_only(Tensor, lambda leaf: leaf.to(self.device), value)

    @contextmanager
    def loaded(self, module: nn.Module, *, write_back: bool = False) -> Iterator[None]:
        """Inside, a module's weights are on the device; with `write_back`, changes to them are kept."""
        copies = self._load_weights(weights_of(module))
        try:
            yield
        finally:
            self._restore_weights(copies, write_back)

    @contextmanager
    def loaded_in_turn(self, model: nn.Module) -> Iterator[None]:
        """Inside, weights outside of blocks are on the device, and those of each block while it runs."""
        if self.device is None:
            yield
            return
        blocks = [model.get_submodule(name) for name in self.blocks]
        in_blocks = {id(tensor) for block in blocks for tensor in weights_of(block)}
        outer = self._load_weights([tensor for tensor in weights_of(model) if id(tensor) not in in_blocks])
        running: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

        def before_block(block: nn.Module, args: Any) -> None:
            running[block] = self._load_weights(weights_of(block))

        def after_block(block: nn.Module, args: Any, output: Any) -> None:
            self._restore_weights(running.pop(block, []), False)

        try:
            with ExitStack() as hooks:
                for block in blocks:
                    hooks.enter_context(block.register_forward_pre_hook(before_block))
                    hooks.enter_context(block.register_forward_hook(after_block))
                yield
        finally:
            for copies in (*running.values(), outer):
                self._restore_weights(copies, False)

    def _load_weights(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Exchange the data of each tensor for a copy on the device; returns tensors and original data."""
        if self.device is None:
            return []
        start = clock(self.device)
        copies = []
        for tensor in tensors:
            if id(tensor) not in self.on_device and tensor.device != self.device:
                original = tensor.data
                tensor.data = original.to(self.device, copy=True)
                self.on_device.add(id(tensor))
                self.transfers.now += original.nbytes
                copies.append((tensor, original))
        self.transfers.peak = max(self.transfers.peak, self.transfers.now)
        self.transfers.seconds += clock(self.device) - start
        return copies

    def _restore_weights(self, copies: Iterable[tuple[Tensor, Tensor]], write_back: bool) -> None:
        start = clock(self.device)
        for tensor, original in copies:
            if write_back:
                original.copy_(tensor.data)
            tensor.data = original
            self.on_device.discard(id(tensor))
            self.transfers.now -= original.nbytes
        self.transfers.seconds += clock(self.device) - start


def clock(device: torch.device | None) -> float:
    """The time after the device has finished all queued work."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def read_offloading(device: Any, folder: Any, model_device: torch.device) -> Offloader:
    """The Offloader for the user's arguments; one that moves nothing if the model is on the device already."""
    try:
        target = model_device if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ReplearnError(f"device={device!r} can't be used here: {str(error).splitlines()[0]}") from error
    if device is not None and target.type == "cpu":
        target = torch.device(device)
    if folder is not None and not Path(folder).is_dir():
        raise ReplearnError(f"offload={str(folder)!r} is no folder: make one on a disk with room for activations.")
    if folder is None and target == model_device:
        return Offloader()
    return Offloader(target, None if folder is None else Path(folder))


def weights_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [tensor for tensor in chain(module.parameters(), module.buffers()) if not tensor.is_meta]


def memory_mapped_copy(tensor: Tensor, folder: Path) -> Tensor:
    """A copy in a memory-mapped file, which is deleted with the tensor."""
    descriptor, name = tempfile.mkstemp(prefix="replearn-", dir=folder)
    os.close(descriptor)
    try:
        mapped = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        return mapped.copy_(tensor)
    except (OSError, RuntimeError) as error:
        raise ReplearnError(f"offload={str(folder)!r} can't hold more: {error}") from error
    finally:
        with suppress(OSError):  # the mapping stays valid without a name
            os.unlink(name)
