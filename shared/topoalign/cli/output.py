"""
Prints the output of the command line, as JSON or as text in aligned columns, with colours only on a terminal.

Data goes to stdout, everything else to stderr. Names of pods, GPUs and machines are untrusted. Text passes through
`clean`, and JSON is escaped, so that a terminal does not interpret part of a name as an escape sequence.
"""

import os
import re
import shutil
import stat
import sys
from collections.abc import Collection, Iterable, Sequence

import click
import msgspec

from topoalign.core.model.errors import clean

_UNUSUAL = re.compile("[^\n -~]")
"""
All characters except printable ASCII and the line feed. msgspec does not escape those of them that JSON permits, but a
terminal can interpret them.
"""


def print_json(data: object) -> None:
    """Prints one JSON document."""
    click.echo(escape_json(msgspec.json.format(msgspec.json.encode(data), indent=2)))


def print_json_line(data: object) -> None:
    """Prints one JSON object on a line of its own (NDJSON), at once."""
    click.echo(escape_json(msgspec.json.encode(data)))
    sys.stdout.flush()


def escape_json(body: bytes) -> str:
    """The JSON with invisible characters, and control characters of terminals, as \\u escapes."""

    def escape(match: re.Match[str]) -> str:
        if match[0].isprintable():
            return match[0]
        halves = match[0].encode("utf-16-be")  # a surrogate pair outside the Basic Multilingual Plane
        return "".join(f"\\u{halves[at : at + 2].hex()}" for at in range(0, len(halves), 2))

    return _UNUSUAL.sub(escape, body.decode())


def print_line(text: str = "") -> None:
    """Prints a line of the answer as text. The caller has passed untrusted text through `clean`."""
    click.echo(text, color=None if colours(sys.stdout) else False)


def note(text: str) -> None:
    """Prints a line that is not part of the answer."""
    click.echo(text, err=True, color=None if colours(sys.stderr) else False)


def pipe() -> int | None:
    """The descriptor of stdout if it is a pipe, else None. It is readable once the read end of the pipe is closed."""
    try:
        descriptor = sys.stdout.fileno()
        return descriptor if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
    except (OSError, ValueError):  # stdout was replaced by something without a descriptor
        return None


def heading(text: str) -> str:
    """The text in bold; `print_line` removes the style if stdout is not a terminal."""
    return click.style(text, bold=True)


def columns(titles: Sequence[str], rows: Iterable[Sequence[object]], without: Collection[str] = ()) -> None:
    """
    Prints rows under their titles, one row per line. On a terminal that is too narrow, each row is a block of lines.
    `without`: the titles of columns to omit.
    """
    kept = [at for at, title in enumerate(titles) if title not in without]
    titles = [titles[at] for at in kept]
    cells = [[clean(str(row[at]), 400) for at in kept] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *cells)
    ]
    if sys.stdout.isatty() and max(map(len, lines)) > shutil.get_terminal_size().columns:
        blocks(titles, cells)
        return
    for line in lines:
        print_line(line)


def blocks(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """A line for each non-empty cell of a row, after its title, and an empty line between rows."""
    width = max(map(len, titles))
    for number, row in enumerate(cells):
        if number:
            print_line()
        for title, cell in zip(titles, row, strict=True):
            if cell not in ("", "-"):
                print_line(f"{heading(title.ljust(width))}  {cell}".rstrip())


def colours(stream: object) -> bool:
    """Whether this stream is a terminal and NO_COLOR is not set (no-color.org)."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and not os.environ.get("NO_COLOR")
