"""Attention + MLP: the attention form, then the MLP branch, as in a block.

    g(X) = g_mlp(g_attention(X))

The paper's "full" form in its parameter ablation. The attention form is the projection or the head-wise one.
Learnable: as the attention form.

Cost: the sum of its two forms, three quarters of a ViT block's matrices.
Fails: where either form does.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal, cast

from torch import Tensor, nn

from ..blocks.anatomy import Anatomy
from ._base.operator import Operator
from ._base.options import MixingOptions, Need, Options
from ._base.site import Site
from .head_wise import HeadWise
from .mlp import MLP
from .projection import Projection


@dataclass(frozen=True, kw_only=True)
class AttentionMLP(MixingOptions):
    """The attention form followed by the MLP form (the paper's full design)."""

    name = "attention_mlp"
    kinds = ("transformer",)

    attention: Literal["projection", "head_wise"] = "projection"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("attention", Literal["projection", "head_wise"])

    def halves(self) -> tuple[Options, ...]:
        """The options of the two forms, with everything they share."""
        kinds = (Projection if self.attention == "projection" else HeadWise), MLP
        return tuple(kind(**{field.name: getattr(self, field.name) for field in fields(kind)}) for kind in kinds)

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        attention, mlp = self.halves()
        return attention.needs(anatomy) + mlp.needs(anatomy)


class AttentionMLPOperator(Operator, options=AttentionMLP):
    attention: Operator
    mlp: Operator

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.attention, self.mlp = (
            half.module(replace(site, target=replace(site.target, operator=half)))
            for half in cast(AttentionMLP, site.options).halves()
        )

    def compute(self, x: Tensor) -> Tensor:
        return self.mlp.compute(self.attention.compute(x))

    def reset_parameters(self) -> None:
        self.attention.reset_parameters()
        self.mlp.reset_parameters()

    def stages(self) -> tuple[Operator, ...]:
        return (self.attention, self.mlp)

    def plain(self) -> nn.Module:
        return nn.Sequential(self.attention.plain(), self.mlp.plain())
