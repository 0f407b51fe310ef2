"""What a conformance suite is: it reads published case files and runs them through the functions the services use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CaseResult:
    """One case: what was expected, what came out. They compare exactly, errors by their kind."""

    id: str
    expected: object
    got: object

    @property
    def passed(self) -> bool:
        return self.expected == self.got


Suite = Callable[[Path], Iterator[CaseResult]]
"""Runs all cases of one file (or folder). Raises InvalidMachine or BadRequest if the file itself cannot be read."""
