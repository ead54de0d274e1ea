"""Where the work is done and where the rest waits: weights come to a device by blocks, samples by batches.

Without a device and a folder nothing moves: everything stays where the model is.
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

SMALL = 1 << 16  # bytes below which a tensor waits in memory


@dataclass(slots=True)
class Moved:
    """The weights on the device, in bytes, the most at a time, and the seconds that moving them took."""

    now: int = 0
    most: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Stream:
    """A device that weights and samples come to while they are used, and a folder for what memory can't hold."""

    device: torch.device | None = None
    folder: Path | None = None
    blocks: tuple[str, ...] = ()
    moved: Moved = field(default_factory=Moved)
    here: set[int] = field(default_factory=set)  # weights on the device now, by id

    def keep(self, value: Any) -> Any:
        """Tensors as they wait: in memory, or in files of the folder; as they are where nothing moves."""
        if self.device is None:
            return value
        return tree_map_only(Tensor, self._kept, value)

    def _kept(self, tensor: Tensor) -> Tensor:
        if self.folder is None or tensor.nbytes < SMALL:
            return tensor.cpu()
        return on_disk(tensor, self.folder)

    def load(self, value: Any) -> Any:
        """Tensors as they are used: on the device."""
        if self.device is None:
            return value
        return tree_map_only(Tensor, lambda leaf: leaf.to(self.device), value)

    @contextmanager
    def weights(self, module: nn.Module, *, changed: bool = False) -> Iterator[None]:
        """The weights of a module on the device for a while; with `changed`, what is written there comes back."""
        moved = self._bring(tensors_of(module))
        try:
            yield
        finally:
            self._send(moved, changed)

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Weights outside of blocks on the device for a while, and those of each block while it runs."""
        if self.device is None:
            yield
            return
        blocks = [model.get_submodule(name) for name in self.blocks]
        inside = {id(tensor) for block in blocks for tensor in tensors_of(block)}
        rest = self._bring([tensor for tensor in tensors_of(model) if id(tensor) not in inside])
        running: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

        def entered(block: nn.Module, args: Any) -> None:
            running[block] = self._bring(tensors_of(block))

        def left(block: nn.Module, args: Any, made: Any) -> None:
            self._send(running.pop(block, []), False)

        try:
            with ExitStack() as hooks:
                for block in blocks:
                    hooks.enter_context(block.register_forward_pre_hook(entered))
                    hooks.enter_context(block.register_forward_hook(left))
                yield
        finally:
            for moved in (*running.values(), rest):
                self._send(moved, False)

    def _bring(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Put a copy on the device into each tensor that is not there, and return both."""
        if self.device is None:
            return []
        begin = self._clock()
        moved = []
        for tensor in tensors:
            if id(tensor) not in self.here and tensor.device != self.device:
                home = tensor.data
                tensor.data = home.to(self.device, copy=True)
                self.here.add(id(tensor))
                self.moved.now += home.nbytes
                moved.append((tensor, home))
        self.moved.most = max(self.moved.most, self.moved.now)
        self.moved.seconds += self._clock() - begin
        return moved

    def _send(self, moved: Iterable[tuple[Tensor, Tensor]], changed: bool) -> None:
        begin = self._clock()
        for tensor, home in moved:
            if changed:
                home.copy_(tensor.data)
            tensor.data = home
            self.here.discard(id(tensor))
            self.moved.now -= home.nbytes
        self.moved.seconds += self._clock() - begin

    def _clock(self) -> float:
        """The time when the device has done all that it was given."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def stream_to(device: Any, folder: Any, home: torch.device) -> Stream:
    """What the user asked for; a Stream that moves nothing where the model is on the device already."""
    try:
        wanted = home if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ReplearnError(f"device={device!r} can't be used here: {str(error).splitlines()[0]}") from error
    if device is not None and wanted.type == "cpu":
        wanted = torch.device(device)
    if folder is not None and not Path(folder).is_dir():
        raise ReplearnError(f"offload={str(folder)!r} is no folder: make one on a disk with room for activations.")
    if folder is None and wanted == home:
        return Stream()
    return Stream(wanted, None if folder is None else Path(folder))


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [tensor for tensor in chain(module.parameters(), module.buffers()) if not tensor.is_meta]


def on_disk(tensor: Tensor, folder: Path) -> Tensor:
    """A copy in a memory-mapped file, which is gone when the tensor is."""
    handle, name = tempfile.mkstemp(prefix="replearn-", dir=folder)
    os.close(handle)
    try:
        made = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        return made.copy_(tensor)
    except (OSError, RuntimeError) as error:
        raise ReplearnError(f"offload={str(folder)!r} can't hold more: {error}") from error
    finally:
        with suppress(OSError):  # the mapping needs no name
            os.unlink(name)
