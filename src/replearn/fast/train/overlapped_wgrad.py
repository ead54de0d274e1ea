"""Overlapped wgrad: in a captured step, weight gradients of convolutions on a side stream.

Of the two gradients of a convolution only that of its input is on the critical path. So the weights of a step go
through a gate, an autograd node that all their gradients pass and that runs last, since the first layer's gradient
is among them. Convolutions compute weight gradients on the side stream, and the gate waits for it. What comes
behind the gate (hooks, sums of gradients, the optimizer) sees the same values as ever.

Sources of synthesized weights go through a second gate: their gradients are computed on the side stream too, and
those of a weight that is both convolved with and synthesized from are added behind both gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..graphs.capture import is_capturing_here
from ..kernels._dispatch import in_transform
from .side_stream import (
    UseCount,
    count_use,
    is_gated_alias,
    mark_overlappable,
    reset_side_stream,
    run_on_side_stream,
    wait_for_side_stream,
)

aten = torch.ops.aten
_LAST = torch.channels_last
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Aliases = dict[int, Tensor]  # by the id of the tensor


class _Gates(NamedTuple):
    """Aliases of a step's tensors behind its two gates."""

    convolved: Aliases
    mixed: Aliases


_gates: ContextVar[_Gates | None] = ContextVar("gates of a step", default=None)


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
    outer = _gates.get()
    learning = list(filter(learns, model.parameters()))
    devices = {parameter.device for parameter in learning}
    if outer is None:
        for device in devices:
            reset_side_stream(device)
    weights = {id(conv.weight): conv.weight for conv in find_overlappable(model)}  # two may share one
    token = _gates.set(gates_of(list(weights.values()), learning, outer))
    try:
        with _Conv2dMode() if outer is None else nullcontext():
            yield
        if outer is None:
            for device in devices:
                wait_for_side_stream(device)
    finally:
        _gates.reset(token)
        if outer is None:
            for device in devices:
                reset_side_stream(device)


def find_overlappable(model: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of a model whose weight gradients can be overlapped; operators' own are not listed."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return [conv for conv in convolutions if conv.bias is None and learns(conv.weight)]


def learns(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad and not is_lazy(parameter)


def gates_of(weights: Sequence[Tensor], learning: Sequence[Tensor], outer: _Gates | None) -> _Gates:
    """Both gates of a step, with the aliases of the step around it."""
    convolved, mixed = (
        dict(zip(map(id, given), through_gate(given), strict=True)) for given in (weights, learning)
    )
    if outer is not None:
        convolved, mixed = outer.convolved | convolved, outer.mixed | mixed
    return _Gates(convolved, mixed)


def through_gate(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Aliases of the tensors behind a gate of their own."""
    if not tensors:
        return tensors
    with torch.enable_grad():
        through: tuple[Tensor, ...] = _Gate.apply(*tensors)  # type: ignore[no-untyped-call]
    mark_overlappable(through)
    return through


def gate_(tensors: Sequence[Tensor]) -> None:
    """Gate weights that are no parameters of the model, in a step that overlaps."""
    if _gates.get() is not None:
        set_aliases(through_gate(tensors), tensors)


def set_aliases(aliases: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Have convolutions, and nothing else, use these aliases."""
    for alias, tensor in zip(aliases, tensors, strict=True):
        tensor._gated_alias = alias  # type: ignore[attr-defined]


def gated_weight(weight: Tensor) -> Tensor:
    """The alias of a convolution's weight behind the gate, or the weight itself."""
    gates = _gates.get()
    if gates is None:
        return weight
    alias = getattr(weight, "_gated_alias", None)
    if alias is not None and (weight._backward_hooks or weight.retains_grad):  # these want the whole gradient
        return weight
    alias = gates.convolved.get(id(weight)) if alias is None else alias
    return alias if alias is not None and is_gated_alias(alias, weight) else weight


def gated_sources(tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The aliases of synthesis sources behind the gate; None if some that learn have none."""
    gates = _gates.get()
    if gates is None:
        return None
    found = [gates.mixed.get(id(tensor)) if tensor.requires_grad else tensor for tensor in tensors]
    pairs = zip(found, tensors, strict=True)
    if not all(alias is tensor or is_gated_alias(alias, tensor) for alias, tensor in pairs):
        return None
    return [alias for alias in found if alias is not None]


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for device in {grad.device for grad in grads if grad is not None}:
            wait_for_side_stream(device)
        return grads


class _Conv2dMode(TorchFunctionMode):
    """Intercepts torch.conv2d, whatever layer calls it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d and all(kind in (Tensor, nn.Parameter) for kind in types):
            return conv2d_overlapped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def conv2d_overlapped(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """torch.conv2d, with an overlapped weight gradient where that is possible."""
    if torch.compiler.is_compiling() or not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    weight = gated_weight(weight)
    uses, pairs = count_use(weight), [as_list(size) for size in (stride, padding, dilation)]
    if uses is None or bias is not None or None in pairs or not can_overlap(input, weight):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        return _Convolution.apply(input, weight, uses, (*pairs, False, [0, 0], groups))  # type: ignore[no-any-return, no-untyped-call]


def can_overlap(input: Tensor, weight: Tensor) -> bool:
    """True for images and weights that autograd records, in dtypes that autocast casts."""
    kind = input.device.type
    return (
        input.dim() == weight.dim() == 4
        and kind == weight.device.type
        and kind in ("cuda", "cpu")
        and input.dtype in _DTYPES
        and weight.dtype in _DTYPES
        and (torch.is_autocast_enabled(kind) or input.dtype is weight.dtype)
        and torch.is_grad_enabled()
        and not in_transform()
    )


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, uses: UseCount, sizes: Any) -> Tensor:
        ctx.dtype, ctx.uses, ctx.sizes = weight.dtype, uses, sizes
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        made: Tensor = aten.convolution(x, weight, None, *sizes)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if x.is_contiguous(memory_format=_LAST):
            grad = grad.contiguous(memory_format=_LAST)

        def gradient(number: int) -> Tensor:
            mask = [place == number for place in range(3)]
            made: Tensor = aten.convolution_backward(grad, x, weight, None, *ctx.sizes, mask)[number]
            return made

        needs_x, needs_weight = ctx.needs_input_grad[:2]
        d_x = gradient(0) if needs_x else None  # first: it is on the critical path
        d_weight = overlap(ctx.uses, lambda: gradient(1).to(ctx.dtype), grad, x) if needs_weight else None
        return d_x, d_weight, None, None


def overlap(uses: UseCount | None, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
    """Compute a weight gradient on the side stream if its weight is gated and used once."""
    return run_on_side_stream(work, *read) if uses is not None and uses.single else work()


def as_list(size: Any) -> list[int] | None:
    """A size in both directions; None for what only torch understands, as 'same'."""
    if type(size) is int:
        return [size, size]
    if isinstance(size, (tuple, list)) and len(size) in (1, 2) and all(type(each) is int for each in size):
        return list(size) * (2 // len(size))
    return None
