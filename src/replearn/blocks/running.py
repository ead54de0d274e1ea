"""Run a model on a batch, and leave it as it was."""

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
    """Some samples of a batch: rows of every tensor that has one for each sample."""
    return tree_map(
        lambda leaf: leaf[begin:end] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf,
        inputs,
    )


def differentiable_attention() -> AbstractContextManager[Any]:
    """Attention as plain arithmetic: the fused kernels have no forward-mode and no second derivatives."""
    return sdpa_kernel(SDPBackend.MATH)


class PrivateRandom(TorchDispatchMode):
    """What this thread draws comes from generators of its own: the global ones, which other threads use, stay."""

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
        drawing = taking_generator(func) if device.type in ("cpu", "cuda") else None
        if drawing is None:  # dropout and attention: without training they draw nothing
            return func(*args, **kwargs)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return drawing(*args, **{**kwargs, "generator": self._generators[device]})


def taking_generator(func: Any) -> Any:
    """The overload of the same arguments that takes a generator besides, or None."""
    own = arguments_of(func)
    own.pop("generator", None)
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        theirs = arguments_of(overload)
        if theirs.pop("generator", None) and theirs == own:
            return overload
    return None


def arguments_of(func: Any) -> dict[str, str]:
    """The type of every argument by name."""
    return {argument.name: str(argument.type) for argument in func._schema.arguments}


@contextmanager
def random_state_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """Set the random state back at the end, unless another thread may have drawn from it."""
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
    """Evaluation mode for a while; afterwards modes, buffers and the random state are as before.

    While other threads run, the random state goes on instead: they may have drawn, and would draw the same again.
    `private` draws nothing from it at all, and makes every operation slower to launch.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = {buffer: buffer.clone() for buffer in model.buffers() if not buffer.is_meta}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    for module in modes:  # not model.eval(), which some models override to freeze parameters too
        module.training = False
    try:
        with PrivateRandom() if private else random_state_kept(list(devices)):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
            module._buffers.update(buffers[module])
        with torch.no_grad():
            for buffer, value in values.items():
                if not torch.equal(buffer, value):  # most models change none
                    buffer.copy_(value)
