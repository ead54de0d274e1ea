"""Shared by every test: no test reaches for the network, and the garbage collector leaves the libraries alone."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
gc.set_threshold(20_000)


def pytest_collection_finish() -> None:
    """What was imported is not walked again and again: half a million objects."""
    gc.freeze()
