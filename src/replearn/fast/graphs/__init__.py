"""CUDA graphs: capture and replay."""
