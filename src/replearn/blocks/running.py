"""Run a model on a batch without changing the model or the random state."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model as users write a batch: a tuple of arguments, a dict of keywords, or the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def size_of(inputs: Any) -> int:
    """The number of samples: the length of the first tensor."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 1


def cut(inputs: Any, size: int, begin: int, end: int) -> Any:
    """Samples `begin` to `end` of a batch: these rows of every tensor with `size` rows."""
    return tree_map(
        lambda leaf: leaf[begin:end] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf,
        inputs,
    )


def differentiable_attention() -> AbstractContextManager[Any]:
    """Attention by plain matmuls: the fused kernels have no forward-mode and no second derivatives."""
    return sdpa_kernel(SDPBackend.MATH)


class PrivateRandom(TorchDispatchMode):
    """Inside, this thread draws random numbers from private generators; the global ones do not advance."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch._dynamo, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
        device = torch.device(kwargs.get("device") or (tensor.device if tensor is not None else "cpu"))
        seeded = overload_with_generator(func) if device.type in ("cpu", "cuda") else None
        if seeded is None:  # dropout and attention, which draw nothing in eval mode
            return func(*args, **kwargs)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return seeded(*args, **{**kwargs, "generator": self._generators[device]})


def overload_with_generator(func: Any) -> Any:
    """The overload that takes the same arguments and a generator, or None."""
    own = argument_types(func)
    own.pop("generator", None)
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        types = argument_types(overload)
        if types.pop("generator", None) and types == own:
            return overload
    return None


def argument_types(func: Any) -> dict[str, str]:
    """The type of every argument by name."""
    return {argument.name: str(argument.type) for argument in func._schema.arguments}


@contextmanager
def restored_random_state(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the random state at the end, unless another thread may have drawn from it."""
    cpu, gpus = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    alone = threading.active_count() == 1
    try:
        yield
    finally:
        if alone and threading.active_count() == 1:
            torch.set_rng_state(cpu)
            for device, state in zip(devices, gpus, strict=True):
                torch.cuda.set_rng_state(state, device)


@contextmanager
def unchanged(model: nn.Module, private: bool = False) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards its modes, its buffers and the random state are restored.

    The random state is not restored while other threads run: they would draw the same numbers twice. With
    `private` nothing is drawn from it, and every operation is slower to launch.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = {buffer: buffer.clone() for buffer in model.buffers() if not buffer.is_meta}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    for module in modes:  # not model.eval(), which some models override to freeze parameters too
        module.training = False
    try:
        with PrivateRandom() if private else restored_random_state(list(devices)):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
            module._buffers.update(buffers[module])
        with torch.no_grad():
            for buffer, value in values.items():
                if not torch.equal(buffer, value):  # most models change none
                    buffer.copy_(value)
