"""The one error class of the package, and other libraries' errors in a line."""


class ReplearnError(ValueError):
    """What was given cannot work; the message says why, and what to write instead."""


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def class_and_line(error: Exception) -> str:
    """An error's class, and what it says in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
