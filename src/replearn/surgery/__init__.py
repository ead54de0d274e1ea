"""Exchange blocks as a plan says, and keep the result: checkpoints, state dicts, backbones, parameter groups."""

from .weights import LoadedBackbone, load_backbone_

__all__ = ["LoadedBackbone", "load_backbone_"]
