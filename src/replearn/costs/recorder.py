"""Record a training step on the fake GPU: the kernels that run, and the memory that is allocated and saved."""

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
    """Records operations and live memory. `model` gets hooks; it is a copy of the user's."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.phase: Phase = "forward"
        self.live = self.peak = 0
        self.path: list[str] = []  # the modules that are running, outermost first
        self._modules = dict(model.named_modules())
        self._size: dict[int, int] = {}  # of live storages
        # allocated before the step
        self._given = {_key(t) for t in (*model.parameters(), *model.buffers(), *tensors_in(example))}
        self._saved: dict[int, Tensor] = {}
        self._unpacked: list[int] = []
        self._ticket = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given, results = tensors_in(args, kwargs), tensors_in(output)
        for tensor in results:
            self._allocate(tensor)
        if runs_no_kernel(func) or not results:
            return output
        floating = (tensor.dtype for tensor in (*given, *results) if tensor.dtype.is_floating_point)
        self.operations.append(
            Operation(
                name=func._overloadpacket.__name__,
                phase=self.phase,
                flops=flops_of(func, args, kwargs, output),
                bytes_moved=bytes_of(given) + bytes_of(results),
                dtype=next(floating, torch.float32),
            )
        )
        return output

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._given or key in self._size or tensor.device.type != "cuda":
            return
        size = allocated(storage.nbytes())
        self._size[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._size.pop(key, 0)

    def saved_bytes(self, results: Any) -> int:
        """Bytes saved for the backward pass (and of the results), each storage once."""
        keys = {_key(tensor) for tensor in (*self._saved.values(), *tensors_in(results))}
        return sum(self._size.get(key, 0) for key in keys - self._given)

    def saving(self) -> saved_tensors_hooks:
        """Hooks that store what autograd saves under a number, so that it can be counted and freed."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> int:
        self._ticket += 1
        self._saved[self._ticket] = tensor
        return self._ticket

    def _unpack(self, ticket: int) -> Tensor:
        self._unpacked.append(ticket)
        return self._saved[ticket]

    def leave_node(self) -> None:
        """Free what the node that has run had saved, as autograd does."""
        for ticket in self._unpacked:
            self._saved.pop(ticket, None)
        self._unpacked.clear()
        self.path.clear()  # a recomputation stops early, inside of modules

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, `path` has the modules that are running."""
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
    """Bytes that the CUDA allocator uses for a tensor of this size."""
    return -(-num_bytes // ALLOCATION) * ALLOCATION


def tensors_in(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def runs_no_kernel(func: Any) -> bool:
    """True for views and empty tensors."""
    schema = func._schema
    views = not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)
    return views or func._overloadpacket.__name__ in FREE


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> int:
    """FLOPs by torch's formulas: two for a multiply and add, none for elementwise work.

    Each gradient of a convolution has the FLOPs of its forward. torch's formula for these ignores groups: for a
    depthwise convolution it is too large by the number of channels.
    """
    from torch.utils.flop_counter import conv_flop_count, flop_registry

    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        (grad, x, weight), transposed, wanted = args[:3], args[7], args[10]
        return sum(wanted[:2]) * int(conv_flop_count(x.shape, weight.shape, grad.shape, transposed))
    in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
    formula = flop_registry.get(in_place.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that these tensors read or write; for an expanded tensor those of its storage."""
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
