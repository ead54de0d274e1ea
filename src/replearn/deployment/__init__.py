"""Turn a replaced model into an ordinary one: deploy, merge, export, quantize."""

from .merge import Merge, find_merges

__all__ = ["Merge", "find_merges"]
