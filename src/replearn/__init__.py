"""Make networks cheaper by replacing blocks, while they are trained or afterwards."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from .errors import ReplearnError

if TYPE_CHECKING:
    from . import models, operators
    from .blocks.anatomy import anatomy
    from .blocks.stacks import find_stacks
    from .compression.compress import compress
    from .deployment.deploy import deploy
    from .fitting.calibrate import calibrate_
    from .fitting.plan import plan
    from .planning.data import Plan
    from .surgery.checkpoint import load, save
    from .surgery.hugging_face import from_pretrained
    from .surgery.replace import param_groups, replace_

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "ReplearnError",
    "anatomy",
    "calibrate_",
    "compress",
    "deploy",
    "find_stacks",
    "from_pretrained",
    "load",
    "models",
    "operators",
    "param_groups",
    "plan",
    "replace_",
    "save",
]

_HOME = {
    "Plan": "planning.data",
    "anatomy": "blocks.anatomy",
    "calibrate_": "fitting.calibrate",
    "compress": "compression.compress",
    "deploy": "deployment.deploy",
    "find_stacks": "blocks.stacks",
    "from_pretrained": "surgery.hugging_face",
    "load": "surgery.checkpoint",
    "param_groups": "surgery.replace",
    "plan": "fitting.plan",
    "replace_": "surgery.replace",
    "save": "surgery.checkpoint",
}


def __getattr__(name: str) -> Any:  # loaded when first used, so that `import replearn` costs next to nothing
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    elif any(folder.name == name and folder.ispkg for folder in iter_modules(__path__)):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
