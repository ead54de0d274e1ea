"""Tensors that are made within torch.inference_mode can't be trained, written to or given gradients after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..planning.validate import own_copy


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make ordinary tensors, without gradients, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def writable(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """The two, or copies of what was made within inference mode: a model's code may write to both."""
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    made_there = any(tensor.is_inference() for tensor in tensors)
    return own_copy(model) if made_there else model, tree_map_only(Tensor, _ordinary, example)


def _ordinary(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
