"""Turn a replaced model into an ordinary one."""

from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ReplearnError
from ..fast.graphs.replay import check_graph
from ..fast.inference import Folding, adapt_, check_backend, check_fuse, check_or_double, check_ready, on_backend
from ..fast.inlining import flatten as flat_form
from ..fast.passes import apply_passes_
from ..fast.passes._context import Context
from ..planning.targets import records_hidden_states
from ..planning.validate import ordinary_tensors, own_copy, unwrapped, writable
from ..surgery.hidden_states import record_replacement
from ..surgery.plan_metadata import detach_plan_
from ..surgery.replace import operators_of, plan_of, set_submodule
from .absorb import absorb_
from .merge import merge_
from .saving import refuse_saving_


@ordinary_tensors()
def deploy(
    model: nn.Module,
    example: Any = None,
    *,
    fold: Folding = "all",
    merge: bool = False,
    flatten: bool = False,
    channels_last: bool = False,
    dtype: torch.dtype | None = None,
    compile: bool | str = False,
    graph: bool = False,
    fuse: bool = False,
) -> nn.Module:
    """Return a new model whose operators are plain modules; `model`, in eval mode, is not changed.

    It has the same outputs: weights are synthesized one last time, and BatchNorms and scales are folded into the
    layers before them, in the whole network (`fold="all"`; `find_folds` says where) or in the operators alone
    (`fold="operators"`, which is what timm's `reparameterize_model` does). With an `example` (a tensor, a tuple of
    arguments or a dict of keywords) both models are run on it and compared. Raises ReplearnError for a difference
    beyond rounding, and for a model that was not replaced, is in train mode or is on two devices.

    `merge=True` merges the sum x + Wx of an operator into its weight, W + I, where its branch is one linear map:
    the fastest form, equal in float32. It is not the default because x then passes through the weight: in half
    precision or TF32 it is rounded to that, and INT8 quantizes W + I more coarsely than W.

    `flatten=True` makes the whole model one flat graph, which runs faster in eager mode; with `merge=True` and a
    `dtype` a transformer's operator is then folded into the linear layer before it. It needs an `example`, takes
    only the arguments of the example, and is compared on a second batch size too. Raises ReplearnError for a model
    whose code can't be traced, and for one with hooks.

    `channels_last` puts the weights in this memory format. `dtype` runs the model under autocast, with the weights
    cast once (in a flat graph on a GPU in channels_last, where nothing depends on strides), `compile` (True, or a
    mode of torch.compile) compiles it, and `graph=True` replays it as CUDA graphs, one for each input signature,
    without gradients: these are for running a model, not for storing it. With `fuse=True`, for a flat graph on a
    CUDA GPU, cuDNN computes each convolution with its bias, the sum and the ReLU after it in one launch, in calls
    without gradients: the fastest form of a ResNet. Each is compared with torch on the example, and stays torch's,
    with a warning, where they differ.

    >>> import replearn, torch
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model))
    >>> plain = replearn.deploy(model.eval(), example=torch.randn(2, 3, 32, 32))
    """
    model, example = writable(unwrapped(model), example)
    plan_of(model)
    check_ready(model)
    check_backend(dtype, compile, flatten=flatten, channels_last=channels_last)
    check_graph(model, graph, compile)
    check_fuse(model, fuse, flatten, compile)
    if not isinstance(merge, bool):
        raise ReplearnError(
            f"merge={merge!r}: write True to merge each operator's sum with its input into its weight, or False."
        )
    if fold not in ("all", "operators"):
        raise ReplearnError(
            f"fold={fold!r}: write 'all' to fold the BatchNorms of the whole network, or 'operators' for those of "
            "the operators alone."
        )
    plain = own_copy(model)
    context = Context(dtype=dtype, compile=bool(compile), graph=graph, fuse=fuse, example=example)
    detach_plan_(plain)
    operators = dict(operators_of(plain))
    for name, operator in operators.items():
        refuse_hooks(name, operator)
        fused = operator.fuse()
        refuse_infinite(name, fused)
        if merge:
            fused = operator.with_block_attributes(merge_(fused, dtype=dtype))
        set_submodule(plain, name, fused)
        record_replacement(plain, operator, fused)
    adapt_(plain, fold=fold, channels_last=channels_last)
    if flatten:
        plain = flat_form(plain, example)
        if merge and dtype is not None:
            absorb_(plain, operators, example, dtype, compiled=bool(compile))
        apply_passes_(plain, context)
    check_or_double(model, plain, example, partial(deploy, fold=fold, merge=merge, flatten=flatten))
    refuse_saving_(
        plain, "Save the model as it was before deploy, which replearn.from_pretrained reads, and deploy again."
    )
    return on_backend(plain, example, compile, context)


def refuse_hooks(name: str, operator: nn.Module) -> None:
    """Raise for hooks, or a `forward` set on the instance, that would be lost with the operator."""
    if "forward" in vars(operator):
        raise ReplearnError(
            f"{name} has a forward of its own, which something set on it, and the plain module in its place would "
            "not run it. Take it off first: del module.forward, or accelerate's remove_hook_from_module."
        )
    for path, module in operator.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not records_hidden_states(hook) for hook in hooks):
            raise ReplearnError(
                f"{f'{name}.{path}'.rstrip('.')} has forward hooks, and the plain module in its place would not "
                "run them. Remove them first, and set them on the deployed model."
            )


def refuse_infinite(name: str, fused: nn.Module) -> None:
    """Raise where a synthesized weight is inf or NaN, as a large one is in float16."""
    for path, parameter in fused.named_parameters():
        if not parameter.is_meta and not bool(parameter.isfinite().all()):
            raise ReplearnError(
                f"{name} can't be deployed: its {path} is inf or NaN in {parameter.dtype}. Look at its "
                "coefficients and at its neighbours' weights; beyond 65504 float16 has none: deploy in "
                "bfloat16 or float32."
            )
