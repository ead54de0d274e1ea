"""The export room: a deployed model in the formats that are shipped, each file read back before it counts.

The folder `formats` is the list of formats, one file each.
"""

from .export import Exported, export, format_of

__all__ = ["Exported", "export", "format_of"]
