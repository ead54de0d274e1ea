"""The one error class of the package."""


class ReplearnError(ValueError):
    """What was given cannot work; the message says why, and what to write instead."""
