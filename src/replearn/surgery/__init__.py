"""Replace blocks as a plan says; checkpoints, state dicts, backbones and parameter groups of replaced models."""

from .weights import LoadedBackbone, load_backbone_

__all__ = ["LoadedBackbone", "load_backbone_"]
