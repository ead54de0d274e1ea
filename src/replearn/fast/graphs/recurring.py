"""The door behind `dtype` on a GPU: a flat graph whose calls are replayed as CUDA graphs once they come again.

Under autocast a GPU is done with a batch before Python has launched its kernels. What a flat graph does follows
from its inputs, its weights and torch's settings alone, so a call that looks like others may be a replay of them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from ..kernels.linear_residual import may_launch
from ..verify import tensors_in
from .backend_flags import settings
from .capture import is_recording
from .repeating import is_bare
from .replay import Recording, Replayed, around, device_of, innermost
from .signature import look_of_call

BEFORE = 2  # calls of a kind that run the model: a pass over a set, with its odd last batch, records one kind
PAYS = 10  # replays of what took a call to record: after so many for each, a change is no sign of others
WRITES = "it writes into its buffers, which recording it does several times"
SEEN = 256  # kinds that are counted, and that are known not to go


class Recurring(Replayed):
    """A model whose calls are replayed as CUDA graphs from the third of their kind on, where nobody can tell.

    That is in eval mode, under torch.no_grad or inference_mode, on a GPU, and where nobody looks on: no hooks, no
    compiler, no tracing, no mode of torch's. All other calls run the model. So do those of more than `most` kinds,
    those in which it writes into what it is given or holds, and those of kinds that can't be recorded, which a
    warning says. Where weights, hooks or torch's settings are found to have changed, the model runs, and kinds are
    counted anew, twice as far if that happens often. Call `forget()` after other changes of what the model does,
    as of an attribute of one of its modules.
    """

    _own = Replayed._own | {"_seen", "_settings", "_refused", "_before", "_replays"}

    def _begin(self) -> None:
        super()._begin()
        self._seen: Counter[Hashable] = Counter()
        self._settings: dict[Hashable, Hashable] = {}
        self._refused: set[Hashable] = set()
        self._before, self._replays = BEFORE, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given: list[Tensor] = []
        kind = self._kind(args, kwargs, given)
        if kind is None:
            return self.model(*args, **kwargs)
        why = None
        with self._lock:
            found = self._recordings.get(kind)
            if found is not None:
                made = self._run(found, given)
                if self._holds(kind, found):  # asked while the GPU works, as for any replay
                    self._replays += 1
                    return made
                made = found = None  # the model needs the memory
                self._lose()
            elif self._seen[kind] >= self._before and self._may_record(kind):
                why = self._tried(kind, args, kwargs, given)
                if why is None:
                    return self._run(self._recordings[kind], given)
        made = self._counted(kind, args, kwargs, given)
        if why is not None:  # the model itself had no trouble
            self._refuse(kind)
            self._tell(why)
        return made

    def forget(self) -> None:
        """Drop every graph; kinds are counted anew, and those that could not be recorded are tried again."""
        with self._lock:
            super().forget()
            self._refused.clear()
            self._before = BEFORE

    def _drop(self) -> None:
        with self._lock:
            super()._drop()
            self._seen.clear()
            self._settings.clear()
            self._replays = 0

    def _lose(self) -> None:
        """Drop every graph after a change, and record the later the less they were of use."""
        self._before = BEFORE if self._replays > PAYS * self._before else 2 * self._before
        self._drop()

    def _kind(self, args: Any, kwargs: Any, given: list[Tensor]) -> Hashable:
        """What calls have in common that may be one replay; None for a call that has to run the model."""
        if torch.is_grad_enabled() or not may_launch() or is_recording():
            return None
        if torch._C._len_torch_function_stack() or "_is_replica" in vars(self):  # nn.DataParallel's, made anew
            return None
        look = look_of_call(args, kwargs, given)
        return (look, around()) if look is not None and given and all(map(can_be_copied, given)) else None

    def _holds(self, kind: Hashable, found: Recording) -> bool:
        """Whether nothing has changed since this was recorded that the model would go by, or be seen by."""
        return (
            found.weights.are_those_of(self.model)
            and self._settings.get(kind) == settings()
            and not is_watched(self.model)
        )

    def _counted(self, kind: Hashable, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """Run the model, and count a call in which it wrote into nothing that it is given or holds."""
        if not self._may_record(kind):
            return self.model(*args, **kwargs)
        before = [(tensor, version_of(tensor)) for tensor in self._held(given)]
        made = self.model(*args, **kwargs)
        pairs = zip(before, self._held(given), strict=False)
        if all(tensor is now and version == version_of(now) for (tensor, version), now in pairs):
            with self._lock:
                if len(self._seen) >= SEEN and kind not in self._seen:
                    self._seen.clear()
                self._seen[kind] += 1
        return made

    def _held(self, given: list[Tensor]) -> Iterator[Tensor]:
        return chain(given, self.model.parameters(), self.model.buffers())

    def _may_record(self, kind: Hashable) -> bool:
        known = kind in self._refused or self.num_graphs >= self.most
        return not (known or is_watched(self.model) or any(module.training for module in self.modules()))

    def _tried(self, kind: Hashable, args: Any, kwargs: Any, given: list[Tensor]) -> str | None:
        """Record calls of this kind; why that can't be done, if it can't."""
        now, why = settings(), None
        try:
            with undone(self.model) as written:
                found = self._record(kind, args, kwargs, given)
            why = WRITES if written else what_a_caller_would_notice(found, self.model)
        except Exception as error:  # whatever it is, the model runs after it, and a warning says what it was
            why = getattr(error, "why", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
        if why is None:
            self._settings[kind] = now
        else:
            self._recordings.pop(kind, None)
        return why

    def _refuse(self, kind: Hashable) -> None:
        if len(self._refused) >= SEEN:
            self._refused.clear()
        self._refused.add(kind)

    def _tell(self, why: str) -> None:
        warnings.warn(
            f"{type(innermost(self)).__name__} goes on without CUDA graphs for inputs of this kind: "
            f"{why.rstrip('.')}. With graph=False none is tried.",
            stacklevel=5,
        )


def can_be_copied(x: Tensor) -> bool:
    """Whether a copy in dense memory is the same to all who look at it, on a device that replays."""
    return (
        is_bare(x)
        and not x.is_quantized
        and x.numel() > 0
        and torch._debug_has_internal_overlap(x) == 0  # nor has it gaps, which a copy would not have
        and replays_on(x.device)
    )


def version_of(tensor: Tensor) -> int:
    """How often it was written into, where torch counts."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def undone(model: nn.Module) -> Iterator[list[Tensor]]:
    """Undo what a recording writes into buffers, in ways that torch does not count, and list those."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    written: list[Tensor] = []
    try:
        yield written
    finally:
        for buffer, was in before:
            if not torch.equal(buffer, was):
                buffer.copy_(was)
                written.append(buffer)


def what_a_caller_would_notice(found: Recording, model: nn.Module) -> str | None:
    """What sets the replays of a recording apart from calls of the model, beside their time."""
    if any(buffer._version != 1 for buffer in found.inputs):  # `record` wrote into them once
        return "it writes into its inputs, and a replay would write into copies of them"
    held = list(chain(found.inputs, model.parameters(), model.buffers()))
    if any(tensor.device != found.device for tensor in held):
        return f"a tensor of its own is not on {found.device}, and a replay might not see a change of it"
    outputs = [place_of(tensor) for tensor in tensors_in(found.output) if tensor.numel()]
    if len(set(outputs)) < len(outputs) or set(map(place_of, held)).intersection(outputs):
        return "its outputs share memory with one another, its inputs or its weights, and a replay's would not"
    return None


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_watched(model: nn.Module) -> bool:
    """Whether somebody's hooks are to hear of its calls, or somebody's code has taken the place of a forward."""
    return nn_module._has_any_global_hook() or any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for module in model.modules()
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
