"""Torture: long trials of what must never happen, one file an item. `make torture` runs them all."""
