"""Removal: nothing in the block's place. The floor that every operator is measured against.

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
    """Nothing in the block's place: the floor."""

    name = "removal"
    kinds = ("basic", "bottleneck", "transformer", "any")

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return ()


class RemovalOperator(Operator, options=Removal):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        anatomy = site.target.anatomy
        said = returned_tuple(site.block) if (anatomy.kind, anatomy.returns) == ("any", "tensor") else ""
        if said:
            raise ReplearnError(
                f"{type(site.block).__qualname__}.forward says that it returns {said}, and Removal would "
                "return the bare input. Use WholeBlock(), or give the class a replearn_anatomy with "
                "returns='tuple'."
            )

    def compute(self, x: Tensor) -> Tensor:
        return x

    def plain(self) -> nn.Module:
        return nn.Identity()


def returned_tuple(block: nn.Module) -> str:
    """The tuple that a block returns, as its signature or all ends of its code have it; '' where there is none."""
    annotation = inspect.signature(block.forward).return_annotation
    if "tuple" in str(annotation).lower():
        return str(annotation)
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(block.forward)))
    except (OSError, TypeError, SyntaxError):  # made at run time: there is nothing to read
        return ""
    ends = [node.value for node in ast.walk(code) if isinstance(node, ast.Return)]
    tuples = [f"({', '.join(map(ast.unparse, end.elts))})" for end in ends if isinstance(end, ast.Tuple)]
    return tuples[0] if tuples and len(tuples) == len(ends) else ""
