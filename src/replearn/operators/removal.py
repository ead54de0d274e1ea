"""Removal: nothing in the block's place. The baseline that every operator must beat.

    g(x) = x

Cost: nothing.
Fails: on a block of unknown kind whose code or signature says that it returns a tuple.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass

from torch import Tensor, nn

from ..blocks.anatomy import Anatomy
from ..errors import ReplearnError
from ._base.operator import Operator
from ._base.options import Need, Options
from ._base.site import Site


@dataclass(frozen=True, kw_only=True)
class Removal(Options):
    """Nothing in the block's place: the baseline of every operator."""

    name = "removal"
    kinds = ("basic", "bottleneck", "transformer", "any")

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return ()


class RemovalOperator(Operator, options=Removal):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        anatomy = site.target.anatomy
        returned = returned_tuple(site.block) if (anatomy.kind, anatomy.returns) == ("any", "tensor") else ""
        if returned:
            raise ReplearnError(
                f"{type(site.block).__qualname__}.forward returns {returned}, and Removal would return the input "
                "tensor. Use WholeBlock(), or give the class a replearn_anatomy with "
                "returns='tuple'."
            )

    def compute(self, x: Tensor) -> Tensor:
        return x

    def plain(self) -> nn.Module:
        return nn.Identity()


def returned_tuple(block: nn.Module) -> str:
    """The tuple that a block returns, by its annotation or by all of its return statements; '' for any other."""
    annotation = inspect.signature(block.forward).return_annotation
    if "tuple" in str(annotation).lower():
        return str(annotation)
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(block.forward)))
    except (OSError, TypeError, SyntaxError):  # no source, as for code that was generated
        return ""
    values = [node.value for node in ast.walk(code) if isinstance(node, ast.Return)]
    tuples = [f"({', '.join(map(ast.unparse, value.elts))})" for value in values if isinstance(value, ast.Tuple)]
    return tuples[0] if tuples and len(tuples) == len(values) else ""
