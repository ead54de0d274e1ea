"""Process-wide settings that are changed for a while, by several threads at once.

If every thread restored the value it found, the last one to leave could restore another thread's change for good.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

Undo = Callable[[], object]


class GlobalSetting:
    """A setting, or several that belong together; restored once no thread needs the change any more."""

    def __init__(self) -> None:
        self._lock, self._active = threading.RLock(), list[list[Undo]]()

    @contextmanager
    def changed(self, change: Callable[[], Undo]) -> Iterator[None]:
        """Call `change`, and at the end of the block the function that it returned, which undoes it."""
        with self._lock:
            undos = [change()]
            self._active.append(undos)
        try:
            yield
        finally:
            with self._lock:
                place = next(index for index, active in enumerate(self._active) if active is undos)
                del self._active[place]
                if place < len(self._active):  # the next change was made on top of this one: it undoes both
                    self._active[place].extend(undos)
                else:
                    for undo in undos:
                        undo()


_fused_encoder = GlobalSetting()


def plain_encoder_layers() -> AbstractContextManager[None]:
    """Disable torch's fused encoder layer: its one kernel hides the layers and has no FLOP formula."""

    def change() -> Undo:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return lambda: torch.backends.mha.set_fastpath_enabled(before)

    return _fused_encoder.changed(change)
