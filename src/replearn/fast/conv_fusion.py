"""The door behind `fuse=True`: a model whose joined convolutions cuDNN computes at once, after a trial."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.precision import convolves_in_tf32
from ..errors import ReplearnError
from .graphs.capture import is_capturing
from .graphs.repeating import is_bare
from .graphs.replay import around, device_of
from .graphs.signature import look_of_call
from .kernels.conv_bias_add_relu import Computing, Trial, at_once, usual
from .kernels.linear_residual import may_launch
from .passes.channels_last import orders_by_channel

MOST = 256  # kinds of input that are remembered
TRIALS = 3  # that said nothing, after which there is no other


class Fused(nn.Module):
    """A flat graph with joined convolutions, each in one launch.

    The first call with inputs of a kind is a trial: torch computes, and each convolution is compared with what
    cuDNN gives in one launch. Where all agree, later calls of that kind are cuDNN's; where one does not, or three
    trials could say nothing, a warning says why, and they stay torch's. A kind is given by shapes, strides and
    dtypes, by the autocast around the call and by torch's switches for cuDNN. Only calls under torch.no_grad or
    inference_mode are cuDNN's. Those that are traced, compiled or exported are torch's, as are those on other
    devices, and all where torch is asked for deterministic algorithms, which cuDNN is not told of here.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._begin()
        self.eval()

    def _begin(self) -> None:
        self._agrees: dict[Hashable, bool] = {}
        self._unsaid: Counter[Hashable] = Counter()  # trials that said nothing
        self._lock = threading.RLock()

    @property
    def num_kinds(self) -> int:
        """For how many kinds of input cuDNN is trusted."""
        return sum(self._agrees.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.model(*args, **kwargs)
        kind = self._kind(args, kwargs)
        agrees = None if kind is None else self._agrees.get(kind)
        if agrees:
            with Computing(at_once):
                return self.model(*args, **kwargs)
        if kind is None or agrees is False or is_capturing():
            with Computing(usual):  # whatever is around
                return self.model(*args, **kwargs)
        return self._try(kind, args, kwargs)

    def _kind(self, args: Any, kwargs: Any) -> Hashable:
        """What a trial holds for; None where torch is to compute."""
        cudnn: Any = torch.backends.cudnn
        if torch.is_grad_enabled() or not may_launch() or not cudnn.enabled:
            return None
        if cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return None
        given: list[Tensor] = []
        look = look_of_call(args, kwargs, given)
        if look is None or not given:
            return None
        if not all(is_bare(x) and x.numel() and runs_at_once_on(x.device) for x in given):
            return None
        return look, around() or convolves_in_tf32(), cudnn.benchmark

    def _try(self, kind: Hashable, args: Any, kwargs: Any) -> Any:
        trial = Trial()
        with self._lock, Computing(trial):
            made = self.model(*args, **kwargs)
            if trial.unsaid is not None:
                self._unsaid[kind] += 1
            wrong = trial.failure or (trial.unsaid if self._unsaid[kind] >= TRIALS else None)
            if wrong is not None or trial.unsaid is None:
                if len(self._agrees) >= MOST:
                    self._forget()
                self._agrees[kind] = wrong is None
        if wrong is not None:
            warnings.warn(
                "fuse=True: a convolution and its ReLU at once, by cuDNN, did not give what torch's operations do "
                f"({wrong}). These compute all further inputs of this kind.",
                stacklevel=5,
            )
        return made

    def _forget(self) -> None:
        self._agrees.clear()
        self._unsaid.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fused:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._forget()  # they may be in another dtype now, or elsewhere
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._forget()  # as above, with assign=True

    def __getstate__(self) -> dict[str, Any]:
        """Without what was found out here: a copy tries anew."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name not in ("_agrees", "_unsaid", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()


def runs_at_once_on(device: torch.device) -> bool:
    """Whether it is a device of cuDNN's."""
    return orders_by_channel(device)


def check_fuse(model: nn.Module, fuse: Any, flatten: bool, compile: Any) -> None:
    """Refuse fuse=True where it can't work, before anything is built."""
    if not isinstance(fuse, bool):
        raise ReplearnError(
            f"fuse={fuse!r}: write True to have cuDNN compute convolutions with their ReLUs, or False."
        )
    if not fuse:
        return
    if not flatten:
        raise ReplearnError(
            "fuse=True needs flatten=True: only in a flat graph can be read off who sees what comes between a "
            "convolution and its ReLU."
        )
    if compile:
        raise ReplearnError(
            f"fuse=True and compile={compile!r} can't be had together: a compiler joins sums and ReLUs itself. "
            "Leave one of them out."
        )
    device = device_of(model, [])
    if not runs_at_once_on(device):
        raise ReplearnError(
            f"fuse=True needs a model on a CUDA GPU with cuDNN, and this {type(model).__name__} is on {device}. "
            "Move it first, as with model.to('cuda'), or leave fuse out."
        )
