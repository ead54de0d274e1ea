"""The door `late_weight_gradients`: in a recorded step, the gradients of convolutions' weights beside the rest.

Backwards, every convolution has two gradients to compute, and only that of its input is waited for. So the weights
of a step go through a gate: a node of autograd's graph that all their gradients have to pass, and that comes last,
since the first layer's is among them. The convolutions compute them beside, and the gate waits. Whatever is behind
it (hooks, sums with what comes from elsewhere, the optimizer) finds them as ever, and the same numbers.

What operators synthesize from goes through a second gate: its gradients are made beside too, and those of a weight
that is convolved with and synthesized from are to be added behind both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from .beside import Uses, beside, forget, may_come_late, used, wait
from .capturing import is_recording
from .transforms import transformed

aten = torch.ops.aten
_LAST = torch.channels_last
StandIns = dict[int, Tensor]  # by what they stand for
_convolved: ContextVar[StandIns | None] = ContextVar("weights behind the gate", default=None)
_mixed: ContextVar[StandIns | None] = ContextVar("what is synthesized from, behind the other", default=None)


@contextmanager
def late_weight_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, where a step is recorded as a CUDA graph, gradients of convolutions' weights are computed beside.

    On a second stream, that is, while the first one goes on with the layer before. They are the same numbers, and
    complete when `backward` returns. Weights that are used twice, and convolutions with a bias, are left alone;
    where nothing is recorded, all are. Enter it around forward and backward pass, anew for every step.

    >>> import torch
    >>> import replearn
    >>> model = replearn.models.resnet32()
    >>> with replearn.late_weight_gradients(model):
    ...     model(torch.randn(2, 3, 32, 32)).sum().backward()
    """
    if not is_recording():
        yield
        return
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    devices = {parameter.device for parameter in learning}
    for device in devices:
        forget(device)
    through = [dict(zip(map(id, given), gate(given), strict=True)) for given in (weights_of(model), learning)]
    tokens = _convolved.set(through[0]), _mixed.set(through[1])
    try:
        with _Late():
            yield
        for device in devices:
            wait(device)
    finally:
        _convolved.reset(tokens[0])
        _mixed.reset(tokens[1])
        for device in devices:
            forget(device)


def weights_of(model: nn.Module) -> list[Tensor]:
    """The weights of a model's convolutions that learn, each once."""
    found = {}
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight = module._parameters.get("weight")
            if weight is not None and weight.requires_grad:
                found[id(weight)] = weight
    return list(found.values())


def gate(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same weights, behind a gate; where nothing is recorded, themselves."""
    if not weights or not is_recording():
        return weights
    through: tuple[Tensor, ...] = _Gate.apply(*weights)  # type: ignore[no-untyped-call]
    may_come_late(through)
    return through


def behind_gate(weight: Tensor) -> Tensor:
    """What stands for the weight of a convolution behind the gate, if there is one."""
    through = _convolved.get()
    return weight if through is None else through.get(id(weight), weight)


def mixed_behind_gate(tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """What stands for these where weights are synthesized from them; None if some that learn have no such."""
    through = _mixed.get()
    if through is None or any(tensor.requires_grad and id(tensor) not in through for tensor in tensors):
        return None
    return [through.get(id(tensor), tensor) for tensor in tensors]


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for device in {grad.device for grad in grads if grad is not None}:
            wait(device)
        return grads


class _Late(TorchFunctionMode):
    """Whoever convolves, and whatever class the layer is of, it is torch's conv2d that is called."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            return conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """torch's, with a weight's gradient that comes late where it may."""
    weight = behind_gate(weight)
    uses = used(weight)
    kind = input.device.type
    low = torch.is_autocast_enabled(kind)
    usual = bias is None and input.dim() == 4 and not isinstance(padding, str) and not transformed()
    if uses is None or not usual or not torch.is_grad_enabled() or not (low or input.dtype is weight.dtype):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    how = pair(stride), pair(padding), pair(dilation), False, [0, 0], groups
    if low:
        input = input.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        return _Convolution.apply(input, weight, uses, how)  # type: ignore[no-any-return, no-untyped-call]


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, uses: Uses, how: Any) -> Tensor:
        ctx.dtype, ctx.uses, ctx.how = weight.dtype, uses, how
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        made: Tensor = aten.convolution(x, weight, None, *how)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if x.is_contiguous(memory_format=_LAST):
            grad = grad.contiguous(memory_format=_LAST)

        def gradient(number: int) -> Tensor:
            wanted = [place == number for place in range(3)]
            made: Tensor = aten.convolution_backward(grad, x, weight, None, *ctx.how, wanted)[number]
            return made

        needs_x, needs_weight = ctx.needs_input_grad[:2]
        of_x = gradient(0) if needs_x else None  # first: the layer before waits for it
        of_weight = when_due(ctx.uses, lambda: gradient(1).to(ctx.dtype), grad, x) if needs_weight else None
        return of_x, of_weight, None, None


def when_due(uses: Uses | None, work: Any, *read: Tensor) -> Tensor:
    """The gradient of a weight: beside, if it goes through a gate alone, and at once elsewhere."""
    made: Tensor = beside(work, *read) if uses is not None and uses.alone else work()
    return made


def pair(size: Any) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size) * (2 // len(size))
