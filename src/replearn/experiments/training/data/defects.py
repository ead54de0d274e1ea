"""What is wrong in a data set, and whether that ends a run: refused at once, or left out and written down."""

from __future__ import annotations

from typing import Literal

from ....errors import ReplearnError

Policy = Literal["refuse", "skip"]
SHOWN = 5


class Defects:
    """Collects what is wrong. Under `refuse` the first defect is an error; under `skip` all are remembered."""

    def __init__(self, policy: Policy = "refuse") -> None:
        self.policy = policy
        self.found: list[str] = []

    def report(self, text: str) -> None:
        """Say one defect: what, in which file."""
        if self.policy == "refuse":
            raise ReplearnError(
                f"{text} Mend it, or write bad_data=skip in the recipe (--set bad_data=skip) to leave it out."
            )
        if text not in self.found:
            self.found.append(text)

    def notes(self) -> list[str]:
        """The defects for a result file: a count and the first few of them."""
        if not self.found:
            return []
        more = f" and {len(self.found) - SHOWN} more (skipped.txt)" if len(self.found) > SHOWN else ""
        return [f"left out as bad data: {' '.join(self.found[:SHOWN])}{more}"]
