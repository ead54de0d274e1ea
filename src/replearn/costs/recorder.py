"""Watch a training step on the fake GPU: which kernels run, and what memory is held by whom."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Phase = Literal["forward", "backward"]
ALLOCATION = 512  # the CUDA allocator gives memory in pieces of this many bytes
FREE = frozenset({"_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "alias", "empty", "empty_like"})


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel that runs in a training step."""

    name: str
    phase: Phase
    flops: int
    bytes_moved: int
    dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """Records operations and live memory; hooks are set on the double, never on the user's model."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.phase: Phase = "forward"
        self.live = self.peak = 0
        self.path: list[str] = []  # of the modules that are running; the innermost is last
        self._modules = dict(model.named_modules())
        self._size: dict[int, int] = {}  # of live storages
        # what was there before the step
        self._given = {_key(t) for t in (*model.parameters(), *model.buffers(), *tensors_in(example))}
        self._saved: dict[int, Tensor] = {}
        self._unpacked: list[int] = []
        self._ticket = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given, results = tensors_in(args, kwargs), tensors_in(made)
        for tensor in results:
            self._hold(tensor)
        if runs_no_kernel(func) or not results:
            return made
        self.operations.append(
            Operation(
                name=func._overloadpacket.__name__,
                phase=self.phase,
                flops=flops_of(func, args, kwargs, made),
                bytes_moved=bytes_of(given) + bytes_of(results),
                dtype=computed_in((*given, *results)),
            )
        )
        return made

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._given or key in self._size or tensor.device.type != "cuda":
            return
        size = allocated(storage.nbytes())
        self._size[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self.live -= self._size.pop(key, 0)

    def saved_bytes(self, results: Any) -> int:
        """Bytes kept for the backward pass (and the results), each storage once."""
        keys = {_key(tensor) for tensor in (*self._saved.values(), *tensors_in(results))}
        return sum(self._size.get(key, 0) for key in keys - self._given)

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
        self.path.clear()  # a checkpointed block is left early when all that was missing is there

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which module runs, until the end of the block."""
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                hooks.enter_context(module.register_forward_hook(self._leave))
            yield

    def _enter(self, name: str, *_: Any) -> None:
        self.path.append(name)

    def _leave(self, *_: Any) -> None:
        self.path.pop()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def allocated(num_bytes: int) -> int:
    """What the CUDA allocator takes for a tensor of this size."""
    return -(-num_bytes // ALLOCATION) * ALLOCATION


def tensors_in(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def runs_no_kernel(func: Any) -> bool:
    """Views and empty tensors cost nothing on the device."""
    schema = func._schema
    views = not schema.is_mutable and any(made.alias_info is not None for made in schema.returns)
    return views or func._overloadpacket.__name__ in FREE


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> int:
    """By torch's own formulas: two for a multiply and add, none for elementwise work.

    A convolution's gradients cost what its forward costs, each. torch's formula for them leaves out the groups:
    for a depthwise one it is too large by the number of channels.
    """
    from torch.utils.flop_counter import conv_flop_count, flop_registry

    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        (grad, x, weight), transposed, wanted = args[:3], args[7], args[10]
        return sum(wanted[:2]) * int(conv_flop_count(x.shape, weight.shape, grad.shape, transposed))
    in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
    formula = flop_registry.get(in_place.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=made))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that these tensors touch; an expanded one touches what it stores."""
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)


def computed_in(tensors: Iterable[Tensor]) -> torch.dtype:
    floating = (tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)
    return next(floating, torch.float32)
