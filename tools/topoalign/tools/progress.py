"""Shows the progress of long measurements and suites."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def show_progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar on stderr while they last if a person looks on."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console  # only for people: a benchmark does not import it
    from rich.progress import track

    yield from track(items, label, total, console=Console(stderr=True), transient=True)
