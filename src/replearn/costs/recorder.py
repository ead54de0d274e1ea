"""Watch a training step on the fake GPU: which kernels run, and what memory is held by whom."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .operations import Operation, Phase, allocated, bytes_of, computed_in, flops_of, runs_no_kernel, tensors_in


class Recorder(TorchDispatchMode):
    """Records operations and live memory; hooks are set on the double, never on the user's model."""

    def __init__(self, model: nn.Module, blocks: Collection[str], operators: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.phase: Phase = "forward"
        self.live = self.peak = 0
        self.path: list[str] = []  # of the modules that are running; the innermost is last
        self._modules = dict(model.named_modules())
        self._blocks = frozenset(blocks)
        self._operators = frozenset(operators)
        self._running: list[str] = []
        self._owner: dict[int, str] = {}  # live storage: the block that made it
        self._size: dict[int, int] = {}
        self._from_batch: set[int] = set()
        self._given: set[int] = set()
        self._saved: dict[int, Tensor] = {}
        self._unpacked: list[int] = []
        self._ticket = 0
        self._starts: list[int] = [0]  # autograd's sequence numbers at which another block takes over
        self._taking_over: list[str] = [""]
        self._synthesis_nodes: set[int] = set()
        self._node: tuple[str, bool] = ("", False)
        for tensor in (*model.parameters(), *model.buffers()):
            self._given.add(_key(tensor))
        for tensor in model.buffers():  # statistics of batches, whose upkeep is no synthesis
            self._from_batch.add(_key(tensor))

    # ---- what runs --------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given, results = tensors_in(args, kwargs), tensors_in(made)
        from_batch = any(_key(tensor) in self._from_batch for tensor in given)
        block, synthesis = self._account(from_batch)
        for tensor in results:
            self._hold(tensor, block, from_batch)
        if runs_no_kernel(func) or not results:
            return made
        if (
            synthesis
            and self.phase == "forward"
            and torch.is_grad_enabled()
            and any(t.requires_grad for t in given)
        ):
            self._synthesis_nodes.add(_sequence() - 1)  # autograd numbered its node just before
        self.operations.append(
            Operation(
                name=func._overloadpacket.__name__,
                block=block,
                phase=self.phase,
                synthesis=synthesis,
                flops=flops_of(func, args, kwargs, made),
                bytes_moved=bytes_of(given) + bytes_of(results),
                outputs=sum(tensor.numel() for tensor in results),
                dtype=computed_in((*given, *results)),
            )
        )
        return made

    def _account(self, from_batch: bool) -> tuple[str, bool]:
        """On whose account an operation goes, and whether it is synthesis."""
        if self.phase == "backward" and not self._running:
            return self._node
        block = self._running[-1] if self._running else ""
        return block, block in self._operators and not from_batch

    def enter_node(self, node: Any) -> None:
        """From here on, work is done for this node of the backward graph."""
        number = node._sequence_nr()
        known = number < 2**62  # those that only accumulate have no number of their own
        block = self._taking_over[bisect_right(self._starts, number) - 1] if known else ""
        self._node = (block, number in self._synthesis_nodes)

    # ---- what is held -----------------------------------------------------------------------

    def mark_batch(self, example: Any) -> None:
        """The user's batch: it was there before the step, and what depends on it is no synthesis."""
        for tensor in tensors_in(example):
            self._given.add(_key(tensor))
            self._from_batch.add(_key(tensor))

    def _hold(self, tensor: Tensor, block: str, from_batch: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if from_batch:
            self._from_batch.add(key)
        if key in self._given or key in self._owner or tensor.device.type != "cuda":
            return
        if not from_batch:
            self._from_batch.discard(key)  # a new storage may have the address of one that is gone
        size = allocated(storage.nbytes())
        self._owner[key], self._size[key] = block, size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self.live -= self._size.pop(key, 0)
        self._owner.pop(key, None)
        self._from_batch.discard(key)

    def saved_bytes(self, results: Any) -> dict[str, int]:
        """Bytes kept for the backward pass (and the results), each storage once, by the block that made it."""
        found: dict[str, int] = {}
        keys = {_key(tensor) for tensor in (*self._saved.values(), *tensors_in(results))}
        for key in keys - self._given:
            if key in self._owner:
                found[self._owner[key]] = found.get(self._owner[key], 0) + self._size[key]
        return found

    def saving(self) -> saved_tensors_hooks:
        """Keep what autograd saves under a ticket, so that it can be counted and let go."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> int:
        self._ticket += 1
        self._saved[self._ticket] = tensor
        return self._ticket

    def _unpack(self, ticket: int) -> Tensor:
        self._unpacked.append(ticket)
        return self._saved[ticket]

    def leave_node(self) -> None:
        """The node has run: what it had saved is freed, as autograd does."""
        for ticket in self._unpacked:
            self._saved.pop(ticket, None)
        self._unpacked.clear()
        self._running.clear()  # a checkpointed block is left early when all that was missing is there
        self.path.clear()
        self._node = ("", False)

    # ---- who is running ---------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which module runs, until the end of the block."""
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._entering(name)))
            handles.append(module.register_forward_hook(self._leaving(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self.path.append(name)
            if name in self._blocks:
                self._running.append(name)
                self._take_over(name)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, made: Any) -> None:
            self.path.pop()
            if name in self._blocks:
                self._running.pop()
                self._take_over(self._running[-1] if self._running else "")

        return leave

    def _take_over(self, block: str) -> None:
        if self.phase == "forward":
            self._starts.append(_sequence())
            self._taking_over.append(block)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _sequence() -> int:
    return int(torch._C._autograd._get_sequence_nr())
