"""Settings of the whole process, changed for a while, by several threads at once.

Where each thread sets back what it found, the one that ends last sets back what another one had set, for good.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

Undo = Callable[[], object]


class Switch:
    """A setting, or several that belong together; once nobody holds it, it is as before the first one came."""

    def __init__(self) -> None:
        self._lock, self._held = threading.RLock(), list[list[Undo]]()

    @contextmanager
    def changed(self, change: Callable[[], Undo]) -> Iterator[None]:
        """What `change` does, until the end of the block; it returns what sets back."""
        with self._lock:
            undoing = [change()]
            self._held.append(undoing)
        try:
            yield
        finally:
            with self._lock:
                place = next(index for index, held in enumerate(self._held) if held is undoing)
                del self._held[place]
                if place < len(self._held):  # who came next found what was set here, and sets back both
                    self._held[place].extend(undoing)
                else:
                    for undo in undoing:
                        undo()


_fused_encoder = Switch()


def plain_encoder_layers() -> AbstractContextManager[None]:
    """Without torch's fused encoder layer, whose one kernel hides the layers and has no FLOPs."""

    def change() -> Undo:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return lambda: torch.backends.mha.set_fastpath_enabled(before)

    return _fused_encoder.changed(change)
