"""The door `late_weight_gradients`: in a recorded step, the gradients of convolutions' weights beside the rest.

Backwards, every convolution has two gradients to compute, and only that of its input is waited for. So the weights
of a step go through a gate: a node of autograd's graph that all their gradients have to pass, and that comes last,
since the first layer's is among them. The convolutions compute them beside, and the gate waits. Whatever is behind
it (hooks, sums with what comes from elsewhere, the optimizer) finds them as ever, and the same numbers.

What operators synthesize from goes through a second gate: its gradients are made beside too, and those of a weight
that is convolved with and synthesized from are to be added behind both.
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

from ..graphs.capture import is_recording
from ..kernels._transforms import transformed
from .side_stream import Uses, beside, forget, may_come_late, stands_for, used, wait

aten = torch.ops.aten
_LAST = torch.channels_last
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
StandIns = dict[int, Tensor]  # by what they stand for


class _Step(NamedTuple):
    """What stands behind the gates of a step."""

    convolved: StandIns
    mixed: StandIns


_step: ContextVar[_Step | None] = ContextVar("step with late gradients", default=None)


@contextmanager
def late_weight_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, where a step is recorded as a CUDA graph, gradients of convolutions' weights are computed beside.

    On a second stream, that is, while the first one goes on with the layer before. They are the same numbers, and
    complete when `backward` returns; they have no second derivatives. Weights that are used twice are left alone,
    and convolutions with a bias; where nothing is recorded, all are. Enter it around forward and backward pass,
    anew for every step. A backward pass to some weights alone goes to all there: they share a node of the graph.
    It is not for layers that write over what others keep for the backward pass, as some do to save memory: what a
    convolution kept is read later than they think.

    >>> import torch
    >>> import replearn
    >>> model = replearn.models.resnet32()
    >>> with replearn.fast.late_weight_gradients(model):
    ...     model(torch.randn(2, 3, 32, 32)).sum().backward()
    """
    if not is_recording():
        yield
        return
    outer = _step.get()
    learning = list(filter(learns, model.parameters()))
    devices = {parameter.device for parameter in learning}
    if outer is None:
        for device in devices:
            forget(device)
    weights = {id(conv.weight): conv.weight for conv in find_late(model)}  # two may share one
    token = _step.set(step_of(list(weights.values()), learning, outer))
    try:
        with _Late() if outer is None else nullcontext():
            yield
        if outer is None:
            for device in devices:
                wait(device)
    finally:
        _step.reset(token)
        if outer is None:
            for device in devices:
                forget(device)


def find_late(model: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of a model whose weights' gradients can come late; operators' own are not counted."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    return [conv for conv in convolutions if conv.bias is None and learns(conv.weight)]


def learns(parameter: Tensor | None) -> bool:
    """Whether it is there, and has gradients."""
    return parameter is not None and parameter.requires_grad and not is_lazy(parameter)


def step_of(weights: Sequence[Tensor], learning: Sequence[Tensor], outer: _Step | None) -> _Step:
    """Both gates of a step, and what is behind those of the one around it."""
    convolved, mixed = (
        dict(zip(map(id, given), through_gate(given), strict=True)) for given in (weights, learning)
    )
    if outer is not None:
        convolved, mixed = outer.convolved | convolved, outer.mixed | mixed
    return _Step(convolved, mixed)


def through_gate(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same tensors, behind a gate of their own."""
    if not tensors:
        return tensors
    with torch.enable_grad():
        through: tuple[Tensor, ...] = _Gate.apply(*tensors)  # type: ignore[no-untyped-call]
    may_come_late(through)
    return through


def let_come_late(tensors: Sequence[Tensor]) -> None:
    """Have convolutions find what stands for these, which are no parameters of the model, in such a step."""
    if _step.get() is not None:
        let_stand(through_gate(tensors), tensors)


def let_stand(late: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Tell convolutions, and nobody else, that these stand for those in a step whose gradients come late."""
    for stand_in, tensor in zip(late, tensors, strict=True):
        tensor._late = stand_in  # type: ignore[attr-defined]


def behind_gate(weight: Tensor) -> Tensor:
    """What stands for the weight of a convolution behind the gate, if there is one."""
    step = _step.get()
    if step is None:
        return weight
    found = getattr(weight, "_late", None)
    if found is not None and (weight._backward_hooks or weight.retains_grad):  # somebody wants all of its gradient
        return weight
    found = step.convolved.get(id(weight)) if found is None else found
    return found if found is not None and stands_for(found, weight) else weight


def mixed_behind_gate(tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """What stands for these where weights are synthesized from them; None if some that learn have no such."""
    step = _step.get()
    if step is None:
        return None
    found = [step.mixed.get(id(tensor)) if tensor.requires_grad else tensor for tensor in tensors]
    pairs = zip(found, tensors, strict=True)
    if not all(stand_in is tensor or stands_for(stand_in, tensor) for stand_in, tensor in pairs):
        return None
    return [stand_in for stand_in in found if stand_in is not None]


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors

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
        if func is torch.conv2d and all(kind in (Tensor, nn.Parameter) for kind in types):
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
    if torch.compiler.is_compiling() or not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    weight = behind_gate(weight)
    uses, pairs = used(weight), [pair(size) for size in (stride, padding, dilation)]
    if uses is None or bias is not None or None in pairs or not fits(input, weight):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        return _Convolution.apply(input, weight, uses, (*pairs, False, [0, 0], groups))  # type: ignore[no-any-return, no-untyped-call]


def fits(input: Tensor, weight: Tensor) -> bool:
    """Whether it is a batch of images whose convolution has a gradient, in numbers that autocast casts."""
    kind = input.device.type
    return (
        input.dim() == weight.dim() == 4
        and kind == weight.device.type
        and kind in ("cuda", "cpu")
        and input.dtype in _DTYPES
        and weight.dtype in _DTYPES
        and (torch.is_autocast_enabled(kind) or input.dtype is weight.dtype)
        and torch.is_grad_enabled()
        and not transformed()
    )


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


def when_due(uses: Uses | None, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
    """The gradient of a weight: beside, if it goes through a gate alone, and at once elsewhere."""
    return beside(work, *read) if uses is not None and uses.alone else work()


def pair(size: Any) -> list[int] | None:
    """A size in both directions; None for what torch is to make sense of."""
    if type(size) is int:
        return [size, size]
    if isinstance(size, (tuple, list)) and len(size) in (1, 2) and all(type(each) is int for each in size):
        return list(size) * (2 // len(size))
    return None
