"""The door behind `dtype` on a GPU: a flat graph whose calls are replayed as CUDA graphs once they come again.

Under autocast a GPU is done with a batch before Python has launched its kernels. What a flat graph does follows
from its inputs, its weights and torch's settings alone, so a call that looks like others may be a replay of them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from .capturing import is_recording
from .errors import ReplearnError
from .nesting import signature
from .repeating import is_bare
from .replaying import Recording, Replayed, around, device_of, innermost
from .residual.operation import may_launch

TIMES = 3  # the call of a kind that is recorded: a pass over a set, with its odd last batch, records one kind
SEEN = 256  # kinds that are counted
_backends: Any = torch.backends


class Recurring(Replayed):
    """A model whose calls are replayed as CUDA graphs from the third of their kind on, where nobody can tell.

    That is in eval mode, under torch.no_grad or inference_mode, on a GPU, and where nobody looks on: no hooks, no
    compiler, no tracing, no mode of torch's. All other calls run the model. So do those of more than `most` kinds,
    and of kinds that can't be recorded, which a warning says. After a change of weights, hooks or torch's settings
    kinds are counted anew.
    """

    _own = Replayed._own | {"_seen", "_settings", "_refused"}

    def _begin(self) -> None:
        super()._begin()
        self._seen: Counter[Hashable] = Counter()
        self._settings: dict[Hashable, Hashable] = {}
        self._refused: set[Hashable] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given: list[Tensor] = []
        kind = self._kind(args, kwargs, given)
        if kind is not None:
            with self._lock, torch.no_grad():
                found = self._recordings.get(kind)
                if found is not None:
                    made = self._run(found, given)
                    if self._holds(kind, found):  # while the GPU works, as for any replay
                        return made
                    self.forget()
                elif self._comes_again(kind) and (found := self._tried(kind, args, kwargs, given)) is not None:
                    return self._run(found, given)
        return self.model(*args, **kwargs)

    def forget(self) -> None:
        """Drop every graph; kinds are counted anew."""
        with self._lock:
            super().forget()
            for known in (self._seen, self._settings, self._refused):
                known.clear()

    def _kind(self, args: Any, kwargs: Any, given: list[Tensor]) -> Hashable:
        """What calls have in common that may be one replay; None for a call that has to run the model."""
        if torch.is_grad_enabled() or not may_launch() or is_recording():
            return None
        if torch._C._len_torch_function_stack() or "_is_replica" in vars(self):  # nn.DataParallel's, made anew
            return None
        look: Hashable
        if len(args) == 1 and not kwargs and type(x := args[0]) is Tensor and x.layout is torch.strided:
            given.append(x)
            look = x.shape, x.stride(), x.dtype, x.device  # the same, in less time
        else:
            try:
                look = signature((args, kwargs), given, "takes")
            except ReplearnError:  # something that calls can't be told apart by
                return None
        seen = bool(given) and all(is_bare(x) and replays_on(x.device) for x in given)
        return (look, around()) if seen else None

    def _holds(self, kind: Hashable, found: Recording) -> bool:
        """Whether nothing has changed since this was recorded that the model would go by, or be seen by."""
        return (
            found.weights.are_those_of(self.model)
            and self._settings[kind] == settings()
            and not is_watched(self.model)
        )

    def _comes_again(self, kind: Hashable) -> bool:
        if kind in self._refused or self.num_graphs >= self.most:
            return False
        if is_watched(self.model) or any(module.training for module in self.modules()):
            return False
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen[kind] += 1
        return self._seen[kind] >= TIMES

    def _tried(self, kind: Hashable, args: Any, kwargs: Any, given: list[Tensor]) -> Recording | None:
        try:
            found = self._record(kind, args, kwargs, given)
        except (ReplearnError, torch.OutOfMemoryError) as error:
            why = str(error).splitlines()[0]
        else:
            if all(buffer._version == 1 for buffer in found.inputs):  # copied to, once
                self._settings[kind] = settings()
                return found
            why = "it writes into its inputs, and a replay would write into copies of them."
            self._recordings.pop(kind)
        if len(self._refused) >= SEEN:
            self._refused.clear()
        self._refused.add(kind)
        warnings.warn(
            f"{type(innermost(self)).__name__} goes on without CUDA graphs for inputs of this kind: {why} With "
            "graph=False none is tried.",
            stacklevel=5,
        )
        return None


def is_watched(model: nn.Module) -> bool:
    """Whether somebody's hooks are to hear of its calls."""
    return nn_module._has_any_global_hook() or any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


def settings() -> Hashable:
    """What torch's kernels go by, beside their tensors and autocast."""
    cudnn, matmul = _backends.cudnn, _backends.cuda.matmul
    return (
        *(matmul.fp32_precision, cudnn.conv.fp32_precision),
        *(matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        matmul.allow_fp16_accumulation,
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()),
        *(_backends.cuda.flash_sdp_enabled(), _backends.cuda.mem_efficient_sdp_enabled()),
        *(_backends.cuda.math_sdp_enabled(), _backends.cuda.cudnn_sdp_enabled()),
    )


def replays_on(device: torch.device) -> bool:
    """Whether it is a device with CUDA graphs."""
    return device.type == "cuda"


def replay_for(
    model: nn.Module, graph: bool | None, *, flatten: bool, dtype: torch.dtype | None, compile: bool | str
) -> type[Replayed] | None:
    """How what is made of the model will be replayed: as asked for, or by itself, where that is safe and pays."""
    if graph is None:
        by_itself = flatten and dtype is not None and not compile and replays_on(device_of(model, []))
        return Recurring if by_itself else None
    return Replayed if graph else None
