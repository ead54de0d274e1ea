"""Reading the neighbours' weights, and the arithmetic of synthesis as pure functions.

norm(W)_c = W_c / sqrt(sum W_c^2 + eps)                      (eq:conv_norm, eq:linear_norm)
W_r       = a * norm(W_prev) + b * norm(W_next) + D          (eq:general_synthesis)
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.anatomy import Part, resolve
from ...errors import ReplearnError

EPS = 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A part of a neighbour, looked up at every read.

    It is plain data and no submodule: the neighbour's keys stay as they are, and after `deepcopy` or pickle of the
    model it refers to the copy's neighbour. If another block takes the neighbour's place, that one is read, unless
    it wraps the neighbour.
    """

    block: nn.Module
    part: Part
    stop_gradient: bool
    owner: nn.Module | None = None  # a module that contains both the operator and the neighbour
    path_from_owner: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.part.path.split("."))

    def look_up(self) -> nn.Module | Tensor:
        return resolve(self.neighbour(), self.part.path)

    def neighbour(self) -> nn.Module:
        """The block that is in the neighbour's place now."""
        found: Any = self.owner
        for name in self.path_from_owner:
            found = found._modules[name]
        if found is self.block or not self.path_from_owner or any(part is self.block for part in found.modules()):
            return self.block
        try:
            resolve(found, self.part.path)
        except AttributeError:
            raise ReplearnError(
                f"{'.'.join(self.path_from_owner)} is a {type(found).__name__} now, without the {self.part.path} "
                "that an operator reads. Put a block of the old class there, or plan again on a fresh model."
            ) from None
        return found

    def weight(self) -> Tensor:
        """The weight as (out, in, ...), in its stored dtype."""
        found = self.look_up()
        # the path of a part is that of a layer, or of a parameter itself
        tensor = self.read() if isinstance(found, Tensor) else self.read("weight")
        return self._rows(tensor.t() if self.part.transposed else tensor)

    def bias(self) -> Tensor | None:
        found = self.look_up()
        if isinstance(found, Tensor) or getattr(found, "bias", None) is None:
            return None
        return self._rows(self.read("bias"))

    def read(self, *below: str) -> Tensor:
        """The whole parameter at a path below the part, detached if `stop_gradient`."""
        return gathered(self._parameter(below), self.stop_gradient)

    def anchors(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Dict, key and value of each module on the path to this source, and of its parameters."""
        found: Any = self.owner
        for name in self.path_from_owner:
            yield found._modules, name, found._modules[name]
            found = found._modules[name]
        found = self.neighbour()
        for name in self.path:
            if isinstance(found, Tensor):
                return
            register = found._modules if name in found._modules else found._parameters
            yield register, name, register.get(name)
            found = register.get(name)
        if isinstance(found, nn.Module):
            yield from ((found._parameters, name, found._parameters.get(name)) for name in ("weight", "bias"))

    def dtype_with(self, x: Tensor, *below: str) -> torch.dtype:
        """The dtype that this parameter has in the neighbour's forward, on an input like x."""
        parameter = self._parameter(below)
        narrower = x.dtype.is_floating_point and x.dtype.itemsize < parameter.dtype.itemsize
        # FSDP2's mixed precision casts a block's input and parameters alike, but not the shards
        return x.dtype if narrower and is_sharded(parameter) and not autocasting(x) else parameter.dtype

    def _parameter(self, below: tuple[str, ...]) -> Tensor:
        *names, last = self.path + below
        modules = [self.neighbour()]
        for name in names:
            modules.append(getattr(modules[-1], name))
        found = optimizer_parameter(modules, last)
        if found is None:
            raise ReplearnError(f"A source has no parameter {'.'.join(self.path + below)} any more.")
        if not torch.compiler.is_compiling() and last in vars(modules[-1]):
            place = ".".join((*self.path_from_owner, *self.path, *below))
            raise ReplearnError(
                f"{place}, which an operator reads, is no parameter any more: pruning or weight_norm computes it "
                "at each call of its layer. Make it permanent first, with torch.nn.utils.prune.remove or "
                "remove_weight_norm."
            )
        return found

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor if self.part.rows is None else tensor[slice(*self.part.rows)]


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is that already."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def row_norms(weight: Tensor) -> Tensor:
    """sqrt(sum of squares + eps) of each output row, kept broadcastable."""
    # sum over dimensions, not over a flattened view: that would copy a channels_last kernel
    return weight.square().sum(dim=tuple(range(1, weight.dim())), keepdim=True).add(EPS).sqrt()


def unit_rows(weight: Tensor) -> Tensor:
    """norm(W): every output row divided by its length."""
    return weight / row_norms(weight)


def per_row(coefficient: Tensor, weight: Tensor) -> Tensor:
    """A coefficient per output channel, shaped to multiply the weight."""
    return coefficient.view(-1, *[1] * (weight.dim() - 1))


def per_head(coefficient: Tensor, weight: Tensor) -> Tensor:
    """A coefficient per head, repeated over the head's columns."""
    width = weight.shape[1] // coefficient.shape[0]
    return coefficient.repeat_interleave(width).view(1, -1)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast: synthesis runs in float32, and only its result is cast."""
    # not torch.amp.is_autocast_available: torch 2.11 can't trace it
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def as_computed(weight: Tensor, x: Tensor) -> Tensor:
    """Cast a synthesized weight to the dtype that x is computed in; autocast does it itself."""
    return weight if autocasting(x) else weight.to(x.dtype)


def autocasting(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


# Neighbours that FSDP2 or tensor parallelism shards over processes: their shards are gathered.


def optimizer_parameter(modules: Sequence[nn.Module], name: str) -> Tensor | None:
    """The parameter of the last of these nested modules that the optimizer has: under FSDP2 the shard.

    While FSDP2 runs a block, it puts gathered tensors in place of the shards and frees their memory afterwards. An
    operator may see these, as in gradient accumulation without resharding, and must not use them: their memory may
    be freed before its backward pass, and a gradient that arrives after the block's own would be lost.
    """
    tensor: Tensor | None = getattr(modules[-1], name, None)
    if torch.compiler.is_compiling():  # a graph has no guards on FSDP2's state
        return tensor
    for module in modules:
        if hasattr(type(module), "_get_fsdp_state"):  # of the class, since a failed lookup on a module is slow
            for shard, unsharded in _shards(module):
                if any(tensor is other for other in unsharded):
                    return shard
    return tensor


def _shards(module: Any) -> Iterator[tuple[Tensor, tuple[Tensor | None, ...]]]:
    """Every shard of an FSDP2 module, with the tensors that FSDP2 may put in its place."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group, 2.13 a list
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in () if group is None else group.fsdp_params:
            names = ("_unsharded_param", "_sharded_post_forward_param")
            yield parameter.sharded_param, tuple(getattr(parameter, name, None) for name in names)


def is_sharded(tensor: Tensor | None) -> bool:
    return hasattr(tensor, "device_mesh")


def gathered(tensor: Tensor, stop_gradient: bool) -> Tensor:
    """A parameter, gathered over all processes, as an ordinary tensor.

    Its gradient is averaged over the processes, as FSDP2 does.
    """
    if stop_gradient:
        tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)
