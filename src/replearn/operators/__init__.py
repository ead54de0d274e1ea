"""The operators: one file each, and this folder is their list.

Each file has a small frozen dataclass of options, which is what users write
(`operators.Basic(stop_gradient=False)`), and the module that computes. To add an operator, add a file: defining
the options class registers it, and it is an attribute of this package.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ._base import options as _options
from ._base.options import Options


def available() -> dict[str, type[Options]]:
    """Every operator by name."""
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            import_module(f"{__name__}.{module.name}")
    return dict(_options.registry)


def __getattr__(name: str) -> Any:  # every operator of the folder, by its own name
    for options in available().values():
        if options.__name__ == name:
            return options
    raise AttributeError(f"replearn.operators has no operator {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(options.__name__ for options in available().values())])
