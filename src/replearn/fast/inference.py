"""Inference of ordinary models: the steps of `deploy` after the operators, for any model in eval mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..blocks.tracing import trace
from ..errors import ReplearnError
from ..operators._base.operator import Operator
from ..planning.validate import ordinary_tensors, own_copy, unwrapped, writable
from .folding import CONVOLUTIONS, fold_, names_in_code, reaches
from .graph_module import FlatGraph
from .graphs.replay import Replayed, check_graph, device_of
from .inlining import cast_weights_
from .inlining import flatten as flat_form
from .kernels.conv_bias_add_relu import has_cudnn
from .passes import apply_passes_
from .passes._context import Context
from .passes.conv_bias_add_relu import fuse_validated_
from .verify import Differs, allowing, other_batch, rebuilt, verify

Folding = Literal["all", "operators"]
_compiled = count()
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@ordinary_tensors()
def streamline(
    model: nn.Module,
    example: Any = None,
    *,
    flatten: bool = False,
    channels_last: bool = False,
    dtype: torch.dtype | None = None,
    compile: bool | str = False,
    graph: bool = False,
    fuse: bool = False,
) -> nn.Module:
    """Return a copy of a model without operators in the form that `deploy` gives a replaced one.

    This is for the baseline of a comparison: BatchNorms are folded, and flat graph, memory format, dtype,
    compiler, replay and fusion are options as in `deploy`. Raises ReplearnError for a model in train mode, on two
    devices, or with operators in it; with an `example`, if the outputs differ beyond rounding; with `flatten`, if
    there is no example or the code can't be traced.

    >>> import replearn, torch
    >>> model = replearn.models.resnet32().eval()
    >>> fast = replearn.fast.streamline(model, torch.randn(2, 3, 32, 32), channels_last=True)
    >>> [type(layer).__name__ for layer in (fast.conv1, fast.bn1)]
    ['Conv2d', 'Identity']
    """
    model, example = writable(unwrapped(model), example)
    check_ready(model)
    check_backend(dtype, compile, flatten=flatten, channels_last=channels_last)
    check_graph(model, graph, compile)
    check_fuse(model, fuse, flatten, compile)
    for name, module in model.named_modules():
        if isinstance(module, Operator):
            raise ReplearnError(
                f"{type(model).__name__} is replaced ({name} is an operator). Use replearn.deploy(model, ...), "
                "which does the same and makes the operators plain."
            )
    plain = own_copy(model)
    context = Context(dtype=dtype, compile=bool(compile), graph=graph, fuse=fuse, example=example)
    adapt_(plain, fold="all", channels_last=channels_last)
    if flatten:
        plain = flat_form(plain, example)
        apply_passes_(plain, context)
    check_or_double(model, plain, example, partial(streamline, flatten=flatten))
    return on_backend(plain, example, compile, context)


def check_ready(model: nn.Module) -> None:
    """Raise for a model in train mode or on several devices."""
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        which = "it" if "" in training else f"its submodule {training[0]}"
        raise ReplearnError(
            f"{type(model).__name__} can't be deployed: {which} is in train mode, where BatchNorm and dropout "
            "compute something else than at inference. Call model.eval() first."
        )
    places: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        found = " and ".join(f"{name} on {device}" for device, name in list(places.items())[:2])
        raise ReplearnError(
            f"{type(model).__name__} can't be deployed: it lies on {len(places)} devices ({found}). Move it to "
            "one first, as with model.to('cpu')."
        )


def check_outputs(model: nn.Module, plain: nn.Module, example: Any) -> None:
    """Compare the two if there is an example; a flat graph on a second batch size too, which must stay free."""
    if example is not None:
        verify(model, plain, example)
        if isinstance(plain, FlatGraph):
            verify(model, plain, other_batch(example))


def check_or_double(model: nn.Module, plain: nn.Module, example: Any, again: Callable[..., Any]) -> None:
    """`check_outputs`; if the outputs differ, `again` repeats the conversion and the comparison in float64.

    Deep networks amplify rounding, untrained ones most, and in a detector it may change which boxes are chosen. A
    difference that is not due to rounding is as large in float64.
    """

    def doubled(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    try:
        check_outputs(model, plain, example)
    except Differs as difference:
        if difference.by is None or all(p.dtype is torch.float64 for p in model.parameters()):
            raise
        try:
            with allowing(min(1e-6, 1e-6 * difference.by)):
                again(own_copy(model).double(), rebuilt(example, doubled))
        except Exception:
            raise difference from None


def check_backend(dtype: Any, compile: Any, **switches: Any) -> None:
    for name, given in switches.items():
        if not isinstance(given, bool):
            raise ReplearnError(f"{name}={given!r}: write True or False.")
    if dtype is not None and dtype not in (torch.bfloat16, torch.float16):
        raise ReplearnError(
            f"dtype={dtype!r} is no dtype to compute in under autocast. Write torch.bfloat16 or torch.float16; "
            "for another precision of the weights convert the model first, as with model.double()."
        )
    if not isinstance(compile, bool) and compile not in MODES:
        raise ReplearnError(f"compile={compile!r}: write True, False, or a mode: {', '.join(MODES)}.")


def adapt_(plain: nn.Module, *, fold: Folding, channels_last: bool) -> None:
    """Fold norms and set the memory format, in place."""
    if fold == "all":
        fuse_timm_(plain)
        fold_(plain)
    if channels_last:
        plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@torch.no_grad()
def fuse_timm_(model: nn.Module) -> None:
    """Reparameterize timm's own layers (RepVGG, MobileOne, LeViT).

    They read their norms for it, so this is done before those are folded.
    """
    for name, child in list(model._modules.items()):
        own = type(child).__module__.startswith("timm.")
        if own and callable(fuse := getattr(child, "fuse", None)):
            setattr(model, name, fuse().eval())
        elif own and callable(reparameterize := getattr(child, "reparameterize", None)):
            reparameterize()
        elif child is not None:
            fuse_timm_(child)


def on_backend(plain: nn.Module, example: Any, compile: bool | str, context: Context) -> nn.Module:
    """Cast weights, fuse convolutions by cuDNN, wrap in autocast, compile, and replay as CUDA graphs."""
    dtype = context.dtype
    if dtype is not None and isinstance(plain, FlatGraph):
        cast_weights_(plain, dtype)
    if context.fuse and isinstance(plain, FlatGraph):
        fuse_validated_(plain, example, dtype)
    if dtype is not None:
        cast_once_(plain, dtype)
        plain = Autocast(plain, dtype)
    if compile:
        compile_(plain, mode=compile if isinstance(compile, str) else None)
    return Replayed(plain) if context.graph else plain


def check_fuse(model: nn.Module, fuse: Any, flatten: bool, compile: Any) -> None:
    """Raise if fuse=True can't work, before anything is built."""
    if not isinstance(fuse, bool):
        raise ReplearnError(f"fuse={fuse!r}: write True to have cuDNN fuse convolutions with ReLUs, or False.")
    if not fuse:
        return
    if not flatten:
        raise ReplearnError(
            "fuse=True needs flatten=True: only a flat graph shows what reads the values between a convolution "
            "and its ReLU."
        )
    if compile:
        raise ReplearnError(
            f"fuse=True and compile={compile!r} can't be had together: a compiler fuses sums and ReLUs itself. "
            "Leave one of them out."
        )
    device = device_of(model, [])
    if not has_cudnn(device):
        raise ReplearnError(
            f"fuse=True needs a model on a CUDA GPU with cuDNN, and this {type(model).__name__} is on {device}. "
            "Move it first, as with model.to('cuda'), or leave fuse out."
        )


def compile_(model: nn.Module, mode: str | None = None, dynamic: bool | None = None) -> None:
    """Compile a model's calls, in place, each through a code object of its own.

    torch caches compiled code by code object, and all modules share that of nn.Module's call: it would cache 8
    models and check the guards of all of them at each call. And it does not compile code of torch.nn, as
    nn.Sequential's.
    """
    call: Any = model._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"call_{next(_compiled)}_of_{type(model).__name__}")
    how: dict[str, Any] = {"options": unchecked()} if mode is None else {"mode": mode}
    model._compiled_call_impl = torch.compile(run, dynamic=dynamic, **how)


def unchecked() -> dict[str, bool]:
    """Options of the compiler that disable the assertions in its generated code, which take time at every call."""
    from torch._inductor import config

    return {name: False for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)}


@torch.no_grad()
def cast_once_(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the weights that autocast would cast at every call in `dtype`, which saves two launches a layer.

    Layers whose weights other code may read are left out: shared ones, and those whose weight the forward of the
    module around them reads, or, if that can't be traced, any code of its class.
    """
    modules = dict(model.named_modules())
    uses = Counter(id(p) for module in modules.values() for p in module._parameters.values() if p is not None)
    for name, module in modules.items():
        if type(module) is not nn.Linear and type(module) not in CONVOLUTIONS:
            continue
        parameters = [p for p in module._parameters.values() if p is not None]
        around, _, key = name.rpartition(".")
        alone = all(uses[id(p)] == 1 and p.dtype is torch.float32 for p in parameters)
        if alone and not (name and may_read(modules[around], key)):
            module.to(dtype)


def may_read(around: nn.Module, key: str) -> bool:
    """True if the code of a module may read the weight of its layer, and not only call it."""
    if "weight" not in names_in_code(around):
        return False
    graphs = trace(around), trace(around, lambda default: default)
    return any(isinstance(graph, str) or reaches(graph, key, called=True) for graph in graphs)


class Autocast(nn.Module):
    """Runs `model` under autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype, self.device_type = model, dtype, device_of(model, []).type
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            return self.model(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Autocast:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.device_type = device_of(self.model, []).type  # it may have been moved
        return self
