"""Export: a deployed model in the formats that are shipped, each file read back before it counts."""

from .export import Exported, export, format_of

__all__ = ["Exported", "export", "format_of"]
