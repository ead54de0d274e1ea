"""Shared by every test: no test reaches for the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
