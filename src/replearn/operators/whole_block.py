"""Whole block: the block's own code, with every parameter synthesized. For any block class at all.

    theta_p = a_p prev.theta_p + b_p next.theta_p    for every parameter p
    g(x)    = block(x; theta)

Learnable: 2 per parameter tensor. Buffers that are constants of the code (index tables, masks) are the block's
own; running statistics are new and start as the mean of the neighbours'.

Cost: all of the block's FLOPs, and the synthesis of every parameter at each step: it saves no forward time.
Fails: with `sources='none'`, on blocks with an RNN, LSTM or GRU inside, and where the neighbours'
parameters have other shapes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.anatomy import Anatomy, has_parts, resolve
from ..errors import ReplearnError
from ._base.checkpointing import checkpointed
from ._base.layers import correction_of
from ._base.operator import MixingOperator
from ._base.options import SIDES, MixingOptions, Need
from ._base.shell import call_with, parameter_names, shell_of
from ._base.site import Site
from ._base.synthesis import full_precision, upcast


@dataclass(frozen=True, kw_only=True)
class WholeBlock(MixingOptions):
    """The block's own code with every parameter mixed from the neighbours' (any block class)."""

    name = "whole_block"
    kinds = ("basic", "bottleneck", "transformer", "any")
    default_for = "any"

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        if not self.sides:
            raise ReplearnError(
                "WholeBlock is nothing but its sources, so they can't be 'none'. Use NoWeights() or Removal(), "
                "which read none."
            )
        return (Need("*"),)


class WholeBlockOperator(MixingOperator, options=WholeBlock):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if any(isinstance(layer, nn.RNNBase) for layer in site.block.modules()):
            raise ReplearnError(
                f"{site.target.name} contains an {nn.RNNBase.__name__} layer (RNN, LSTM or GRU), whose weights "
                "can't be synthesized: it keeps flat copies of them. Keep this block, or use operators.Removal()."
            )
        self._names = tuple(parameter_names(site.block))
        for name in self._names:
            parameter = site.block.get_parameter(name)
            self._sources[name] = site.sources(name)
            self._num_synthesized += parameter.numel()
            correction = correction_of(
                site.options, tuple(parameter.shape), site, where=f"{site.target.name}, {name}"
            )
            if correction is not None:
                self.corrections[self._key(name)] = correction
        self._sides = tuple(s for s in SIDES if any(s in found for found in self._sources.values()))
        self.make_coefficients(site, self._sides, len(self._names))
        self.run = _ForwardOnly(shell_of(site.block, device=site.device))
        if site.device.type != "meta":
            start_statistics(self.run.block, site)

    @staticmethod
    def _key(name: str) -> str:
        return name.replace(".", "/")  # a module's name may not contain dots

    def parameters_of_block(self, x: Tensor | None = None) -> dict[str, Tensor]:
        """Every synthesized parameter of the block, in the dtype of its source or the one for x."""
        parameters = {}
        for index, name in enumerate(self._names):
            terms = [self.coefficient(side)[index] * weight for side, weight in self.source_weights(name).items()]
            if (delta := self.delta(self._key(name))) is not None:
                terms.append(upcast(delta))
            source = next(iter(self._sources[name].values()))
            dtype = source.read().dtype if x is None else source.dtype_with(x)
            parameters[name] = sum(terms[1:], terms[0]).to(dtype)
        return parameters

    def compute(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # checkpointed by itself, a Hugging Face block would be recomputed without its parameters
        if getattr(self.run.block, "gradient_checkpointing", False) and self.training:
            return checkpointed(self._call, (self,), *args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        x = first_tensor(args, kwargs)
        with full_precision(x.device):
            parameters = {f"block.{name}": tensor for name, tensor in self.parameters_of_block(x).items()}
        return call_with(parameters, self.run, args, kwargs)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.start_coefficients({side: torch.ones_like(self.coefficient(side)) for side in self._sides})
        if self._options.start == "mean":  # some parameters have one source only
            for index, found in enumerate(self._sources.values()):
                for side in self._sides:
                    self.coefficient(side)[index] = 1 / max(1, len(found))

    @torch.no_grad()
    def zero_branch(self) -> bool:
        """Zero the last maps of the branches if the anatomy names them, and else every parameter."""
        super().reset_parameters()
        parts = self.target.anatomy.parts
        roles = ("proj", "down") if self.target.anatomy.kind == "transformer" else ("norm",)
        last = tuple(f"{parts[role].path}." for role in roles) if parts.keys() >= set(roles) else ("",)
        for index, name in enumerate(self._names):
            if name.startswith(last):
                for coefficient in self.coefficients():
                    coefficient[index] = 0
        return True

    def plain(self) -> nn.Module:
        fill = {name: tensor.clone() for name, tensor in self.parameters_of_block().items()}
        return shell_of(self.run.block, fill=fill)

    def fuse(self) -> nn.Module:
        with torch.no_grad():
            return self.plain().eval()


class _ForwardOnly(nn.Module):
    """Calls a block's `forward` directly, without its class's `__call__`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise ReplearnError("A replaced block was called without a tensor.")


@torch.no_grad()
def start_statistics(shell: nn.Module, site: Site) -> None:
    """Set running statistics to the mean of the neighbours'."""
    for path, layer in shell.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._NormBase):
            continue
        layer.reset_running_stats()
        # the first block of a stage may lack a layer
        blocks = [resolve(block, path) for block in map(site.neighbour, SIDES) if has_parts(block, path)]
        for name in ("running_mean", "running_var"):
            own: Any = getattr(layer, name)
            values: list[Any] = [getattr(block, name, None) for block in blocks]
            fitting = [
                value for value in values if value is not None and value.shape == getattr(own, "shape", None)
            ]
            if fitting:
                own.copy_(torch.stack(fitting).mean(0))
