"""Overlapped wgrad: in a captured step, weight gradients of convolutions on a side stream.

Of the two gradients of a convolution only that of its input is on the critical path. So the weights of a step go
through a gate, an autograd node that all their gradients pass and that runs last, since the first layer's gradient
is among them. Convolutions compute weight gradients on the side stream, and the gate waits for it. What comes
behind the gate (hooks, sums of gradients, the optimizer) sees the same values as ever. Synthesized weights are no
parameters: their gradients are computed on the main stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parameter import is_lazy

from ..graphs.capture import is_capturing_here
from ..kernels._dispatch import in_transform
from .class_patching import patched_class, reduce_as

aten = torch.ops.aten
_LAST = torch.channels_last
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Aliases = dict[int, Tensor]  # weights of a step behind its gate, by the id of the weight
_aliases: ContextVar[Aliases | None] = ContextVar("weights behind the gate", default=None)
_side_streams: dict[tuple[torch.device, int], SideStream] = {}  # by the main stream


@contextmanager
def overlapped_wgrad(model: nn.Module) -> Iterator[None]:
    """Inside, where a step is captured as a CUDA graph, convolutions' weight gradients run on a side stream.

    They are complete when `backward` returns, and have no second derivatives. Weights that are used twice and
    convolutions with a bias are left alone. A backward pass to some weights alone goes to all, since they share a
    gate. It is not for layers that write over what others keep for the backward pass.
    """
    if not is_capturing_here():
        yield
        return
    outer = _aliases.get()
    convolutions = find_overlappable(model)
    weights = {id(conv.weight): conv.weight for conv in convolutions}  # two may share one
    devices = {weight.device for weight in weights.values()} if outer is None else set()
    for device in devices:
        side_stream(device).reset()  # a capture may have failed, whose events can't be waited for
    token = _aliases.set((outer or {}) | dict(zip(weights, through_gate(*weights.values()), strict=True)))
    plain = [conv for conv in convolutions if type(conv) is nn.Conv2d]
    try:
        with patched_class(plain, nn.Conv2d, OverlappedConv2d):
            yield
        for device in devices:
            side_stream(device).wait()
    finally:
        _aliases.reset(token)
        for device in devices:
            side_stream(device).reset()


def find_overlappable(model: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of a model whose weight gradients can be overlapped; operators' own are not listed."""
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.bias is None]
    owning: list[Any] = [conv for conv in found if isinstance(conv.weight, Tensor)]
    return [conv for conv in owning if conv.weight.requires_grad and not is_lazy(conv.weight)]


class SideStream:
    """A stream for work that is needed late, the end of what runs on it, and the tensors that this reads.

    Kernels of two streams run at a time: where one leaves multiprocessors idle, or waits for memory, another can
    start. The tensors are kept until the main stream has waited, since their memory must not be reused meanwhile.
    So there is one piece of work at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.end: torch.cuda.Event | None = None
        self.kept: tuple[Tensor, ...] = ()

    def run(self, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
        """Run work after all that the current stream has launched so far."""
        if self.stream is None:
            return work()
        self.wait()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            made = work()
        self.end, self.kept = self.stream.record_event(), read
        return made

    def wait(self) -> None:
        """Let the current stream wait; then the tensors that were read may be freed."""
        if self.stream is not None and self.end is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.end)
        self.reset()

    def reset(self) -> None:
        self.end, self.kept = None, ()


def side_stream(device: torch.device) -> SideStream:
    """The side stream of the current one."""
    key = device, stream_id(device)
    if key not in _side_streams:
        _side_streams[key] = SideStream(device)
    return _side_streams[key]


def stream_id(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class UseCount:
    """In how many computations a gated weight was used, and the stream of its gate.

    Autograd adds the gradients of two uses before the gate has waited, so only a single one may be overlapped.
    """

    def __init__(self, stream: int) -> None:
        self.count, self.stream = 0, stream


def count_use(tensor: Tensor) -> UseCount | None:
    """Count a computation with a gated weight; None for other tensors."""
    uses: UseCount | None = getattr(tensor, "_overlap_uses", None)
    if uses is not None:
        uses.count += 1
    return uses


def through_gate(*weights: Tensor) -> tuple[Tensor, ...]:
    """Aliases of the weights behind a gate of their own."""
    if not weights:
        return ()
    with torch.enable_grad():
        through: tuple[Tensor, ...] = _Gate.apply(*weights)  # type: ignore[no-untyped-call]
    for alias in through:
        alias._overlap_uses = UseCount(stream_id(alias.device))  # type: ignore[attr-defined]
    return through


def gated_weight(weight: Tensor) -> Tensor:
    """The alias of a convolution's weight behind the gate, or the weight itself."""
    alias = (_aliases.get() or {}).get(id(weight))
    return alias if alias is not None and is_alias(alias, weight) else weight


def is_alias(alias: Tensor, weight: Tensor) -> bool:
    """True if `alias` is still the same tensor behind a gate on this stream."""
    uses: UseCount = alias._overlap_uses  # type: ignore[attr-defined]
    return (
        alias.requires_grad is weight.requires_grad
        and alias.data_ptr() == weight.data_ptr()
        and alias.shape == weight.shape
        and uses.stream == stream_id(weight.device)
    )


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for device in {grad.device for grad in grads if grad is not None}:
            side_stream(device).wait()
        return grads


class OverlappedConv2d(nn.Conv2d):
    """nn.Conv2d without a bias inside `accelerate`: its weight gradient is overlapped where that is possible."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain = super()._conv_forward
        if torch.compiler.is_compiling():
            return plain(input, weight, bias)
        weight = gated_weight(weight)
        uses = count_use(weight)
        padded = self.padding_mode == "zeros" and not isinstance(self.padding, str)  # as aten pads
        if uses is None or not padded or not can_overlap(input, weight):
            return plain(input, weight, bias)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        sizes = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        with torch.autocast(device, enabled=False):
            return _Convolution.apply(input, weight, uses, sizes)  # type: ignore[no-untyped-call]

    __reduce_ex__ = reduce_as(nn.Conv2d)


def can_overlap(input: Tensor, weight: Tensor) -> bool:
    """True for images and weights that autograd records, in dtypes that autocast casts."""
    device = input.device.type
    return (
        type(input) is Tensor
        and input.dim() == 4
        and device == weight.device.type
        and device in ("cuda", "cpu")
        and input.dtype in _DTYPES
        and weight.dtype in _DTYPES
        and (torch.is_autocast_enabled(device) or input.dtype is weight.dtype)
        and torch.is_grad_enabled()
        and not in_transform()
    )


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, uses: UseCount, sizes: Any) -> Tensor:
        ctx.dtype, ctx.uses, ctx.sizes = weight.dtype, uses, sizes
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return aten.convolution(x, weight, None, *sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if x.is_contiguous(memory_format=_LAST):
            grad = grad.contiguous(memory_format=_LAST)

        def gradient(number: int) -> Tensor:
            mask = [place == number for place in range(3)]
            return aten.convolution_backward(grad, x, weight, None, *ctx.sizes, mask)[number]

        needs_x, needs_weight = ctx.needs_input_grad[:2]
        d_x = gradient(0) if needs_x else None  # first: it is on the critical path
        d_weight = overlap(ctx.uses, lambda: gradient(1).to(ctx.dtype), grad, x) if needs_weight else None
        return d_x, d_weight, None, None


def overlap(uses: UseCount | None, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
    """Compute a weight gradient on the side stream if its weight is gated and used once."""
    return side_stream(read[0].device).run(work, *read) if uses is not None and uses.count == 1 else work()
