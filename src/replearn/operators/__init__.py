"""The operators: one file each, and this folder is their list.

Each file holds a small frozen dataclass of options, which is what users write
(`operators.Basic(stop_gradient=False)`), and the module it stands for. To add an operator, add
a file: defining the options class registers it, and it appears here under its own name.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ._base.options import Options, registry

if TYPE_CHECKING:  # for type checkers; at run time __getattr__ finds every operator of the folder
    from .attention_mlp import AttentionMLP as AttentionMLP
    from .basic import Basic as Basic
    from .bottleneck import Bottleneck as Bottleneck
    from .head_wise import HeadWise as HeadWise
    from .mlp import MLP as MLP
    from .no_weights import NoWeights as NoWeights
    from .projection import Projection as Projection
    from .reduced_bottleneck import ReducedBottleneck as ReducedBottleneck
    from .removal import Removal as Removal
    from .whole_block import WholeBlock as WholeBlock


def available() -> dict[str, type[Options]]:
    """Every operator by name."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return registry()


def __getattr__(name: str) -> type[Options]:
    for options in available().values():
        if options.__name__ == name:
            return options
    raise AttributeError(f"replearn.operators has no operator {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(options.__name__ for options in available().values())])
