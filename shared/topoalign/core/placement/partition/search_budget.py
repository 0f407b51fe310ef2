"""Limits the work of a search: it counts its steps, and ends with TooMuchWork."""

from typing import NoReturn

from topoalign.core.model.errors import TooMuchWork


class PartitionSearchBudget:
    """Counts the steps of one search against a limit. No clock: the same question always gets the same answer."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self, steps: int = 1) -> None:
        """Counts `steps` more. Raises TooMuchWork when the limit is exceeded."""
        self.steps -= steps
        if self.steps < 0:
            self.give_up()

    def give_up(self) -> NoReturn:
        """Raises TooMuchWork."""
        raise TooMuchWork(
            "the best way to split the devices was not found within the limit on work",
            "take the greedy answer, or split fewer devices",
        )
