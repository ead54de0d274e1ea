"""Import all kernels, which register faster versions of `operators/functional.py`."""

from importlib import import_module
from pkgutil import iter_modules

from . import kernels

for _file in iter_modules(kernels.__path__):
    if not _file.name.startswith("_"):
        import_module(f"{kernels.__name__}.{_file.name}")
