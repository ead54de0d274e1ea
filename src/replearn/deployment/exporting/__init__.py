"""Export a deployed model to a file that runs without this package; each file is read back and compared."""

from .export import Exported, export, format_of

__all__ = ["Exported", "export", "format_of"]
