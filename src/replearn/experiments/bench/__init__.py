"""Measuring: candidates side by side in one process, in turns, so that only ratios within a run are told."""
