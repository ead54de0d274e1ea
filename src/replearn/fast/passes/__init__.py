"""Rewrites of a flat fx graph: one file each, named after what it fuses or moves."""
