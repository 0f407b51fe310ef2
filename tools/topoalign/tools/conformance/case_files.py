"""
Reads case files: JSON Lines, one case a line.

Lines are read one by one. A line that is not a case of its suite is one failed case, and the others still run.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from topoalign.core.model.errors import Undecodable, clean, quoted
from topoalign.tools.conformance.suite import CaseResult, Outcome, attempted

C = TypeVar("C", bound=msgspec.Struct)


class Beside:
    """A file beside that of the cases: things that cases name, each decoded when it is asked for."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises Undecodable if it cannot be read, or is no table of things."""
        self._name = name
        try:
            self._listed = msgspec.json.decode((path.parent / name).read_bytes(), type=dict[str, msgspec.Raw])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Undecodable(name, clean(str(error), 200)) from error

    def __getitem__(self, name: str) -> msgspec.Raw:
        """The JSON of one of them. Raises Undecodable if it is missing."""
        if name not in self._listed:
            raise Undecodable("a name", f"{quoted([name])} is not in {self._name}")
        return self._listed[name]


class Named(msgspec.Struct, frozen=True):
    """What of a line tells which case it is."""

    id: str


def results(
    path: Path, kind: type[C], outcome: Callable[[C], Outcome], cleared: Callable[[object], object] = lambda line: line
) -> Iterator[CaseResult]:
    """
    Each line that is not blank, cleared of what means nothing, read as this kind of case and run.

    Raises OSError if the file cannot be read.
    """

    def run(line: bytes) -> Outcome:
        return outcome(msgspec.convert(cleared(msgspec.json.decode(line)), kind, str_keys=True))

    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield attempted(id_of(line) or f"line {number} of {clean(path.name)}", run, line)


def id_of(line: bytes) -> str | None:
    """The id of the case in this line, which may be no case otherwise."""
    try:
        return msgspec.json.decode(line, type=Named).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
