"""
The type of a conformance suite: it reads published case files and runs them through the functions of the services.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from topoalign.core.model.errors import TopoalignError

T = TypeVar("T")

Outcome = tuple[object, object]
"""What was expected, what came out."""

RUNS = "a case that can be read and run"
"""What is expected where nothing came out."""


@dataclass(frozen=True)
class CaseResult:
    """One case: what was expected, what came out. They compare exactly, errors by their kind."""

    id: str
    expected: object
    got: object

    @property
    def passed(self) -> bool:
        """Whether the result equals the expectation."""
        return self.expected == self.got


@dataclass(frozen=True)
class RatedResult(CaseResult):
    """A case whose outcome is a ratio between 0 and 1: how much of the best possible was reached."""

    group: str
    """What the case is summed up with: the machine."""
    ratio: float
    least: float
    """The least ratio that passes."""

    @property
    def passed(self) -> bool:
        """Whether the ratio is large enough."""
        return self.ratio >= self.least


Suite = Callable[[Path], Iterator[CaseResult]]
"""Runs all cases of one file (or folder). Raises InvalidMachine, BadRequest or OSError if the file itself cannot be read."""


def attempted(name: str, run: Callable[[T], Outcome], case: T) -> CaseResult:
    """The result of a case. One that cannot be read or run has failed, with the error for what came out."""
    try:
        return CaseResult(name, *run(case))
    except Exception as error:  # whatever it is: one odd case must not keep all others from being run
        kind = error.code if isinstance(error, TopoalignError) else type(error).__name__
        return CaseResult(name, RUNS, f"{kind}: {error}")
