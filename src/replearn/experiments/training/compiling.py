"""What torch.compile needs where one process compiles many models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

GRAPHS = 256  # of one forward's code; torch's own limit of 8 is used up by a few methods, batches and models


@contextmanager
def many_graphs() -> Iterator[None]:
    """Let one class of models be compiled as often as it takes.

    Beyond its limit torch.compile says so once, in the log, and runs every later model eagerly: rows of one table
    would be compiled and not compiled.
    """
    from torch._dynamo import config

    with config.patch(recompile_limit=max(GRAPHS, config.recompile_limit), accumulated_recompile_limit=8 * GRAPHS):
        yield


def not_compiled(compiled: bool) -> AbstractContextManager[object]:
    """Run what was compiled as it is written: an evaluation has other shapes, each of which would be compiled."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
