"""Reading case files: JSON Lines, one case a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from topoalign.core.errors import Undecodable, clean

C = TypeVar("C", bound=msgspec.Struct)


def cases(path: Path, kind: type[C]) -> Iterator[C]:
    """The cases of a file. Raises Undecodable that names the line which is not a case of this kind."""
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise Undecodable(f"line {number} of {clean(path.name)}", clean(str(error), 200)) from error
