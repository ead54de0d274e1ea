"""Look at values inside a block while it runs: what an operation reads and what it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ReplearnError
from .calls import Arguments, first, slow_attention
from .trace import Key


@dataclass(frozen=True, slots=True)
class Tap:
    """A value to look at: the positional argument `place` of an operation, or its result where that is -1."""

    key: Key
    place: int = -1


def tapped(
    block: nn.Module, arguments: Arguments, taps: Iterable[Tap], *, to_the_end: bool = True
) -> tuple[Tensor | None, dict[Tap, Tensor]]:
    """Run a block and return its output and the values at the taps.

    With `to_the_end=False` the run ends when all taps are seen, and the output is None. Raises ReplearnError
    where an operation did not run: the block's code took another way than when it was traced.
    """
    wanted = tuple(dict.fromkeys(taps))
    looking = _Looking(wanted, stop=not to_the_end)
    made = None
    with slow_attention(), torch.no_grad():
        try:
            if wanted:
                with looking:
                    made = first(arguments.run(block))
            else:
                made = first(arguments.run(block))
        except _Seen:
            pass
    if len(looking.found) < len(wanted):
        missing = next(tap for tap in wanted if tap not in looking.found)
        raise ReplearnError(
            f"{type(block).__name__} took another way through its code on this batch than on the first: its "
            f"{missing.key[0]} number {missing.key[1]} did not run. Give batches of one kind and length."
        )
    return made, looking.found


class _Seen(Exception):
    pass


class _Looking(TorchDispatchMode):
    def __init__(self, taps: Iterable[Tap], *, stop: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Tap, Tensor] = {}
        self._wanted: dict[Key, list[Tap]] = {}
        for tap in taps:
            self._wanted.setdefault(tap.key, []).append(tap)
        self._left = sum(map(len, self._wanted.values()))
        self._stop = stop
        self._counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        taps = self._wanted.get((name, self._counts[name]), ())
        self._counts[name] += 1
        # copies, because code after this may write into these tensors
        for tap in taps:
            if tap.place >= 0:
                self._note(tap, args[tap.place])
        made = func(*args, **(kwargs or {}))
        for tap in taps:
            if tap.place < 0:
                self._note(tap, next(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)))
        return made

    def _note(self, tap: Tap, value: Tensor) -> None:
        self.found[tap] = value.detach().clone()
        self._left -= 1
        if self._stop and not self._left:
            raise _Seen
