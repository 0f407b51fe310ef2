"""The cases in which somebody reads the registry of a large cluster over HTTP."""

from collections.abc import Callable, Iterator
from itertools import cycle

import msgspec

from topoalign.tools.bench.device_plugin.node import Row
from topoalign.tools.bench.registry.history import History
from topoalign.tools.bench.registry.reader import Reader
from topoalign.tools.measuring import measure_calls

LIMIT = 500
ALLOCATIONS = "/v1/allocations"
NODES = "/v1/nodes"


class Item(msgspec.Struct):
    """A row of a list, of which only one field is read."""

    stale: bool = False


class Summary(msgspec.Struct):
    """How far a node has been received."""

    revision: int
    seq: int


class Detail(msgspec.Struct):
    """The page of a node."""

    summary: Summary


class Part(msgspec.Struct):
    """A page of a list."""

    items: list[Item]
    next: str | None = msgspec.field(name="continue")


def cases(reader: Reader, calls: int) -> Iterator[Callable[[], Row]]:
    """The cases `page`, `walk` and `metrics`, to be run one after the other."""
    few = max(2, calls // 10)
    paths = cycle([path for path, _ in walk(reader, ALLOCATIONS)])
    yield lambda: measure_calls("page", lambda: reader.get(next(paths)), calls)
    yield lambda: measure_calls("walk", lambda: list(walk(reader, ALLOCATIONS)), few, warm=1)
    yield lambda: measure_calls("metrics", lambda: reader.get("/metrics"), few, warm=1)


def stale(reader: Reader) -> int:
    """The number of nodes that are shown as stale."""
    return sum(item.stale for _, part in walk(reader, NODES) for item in part.items)


def shows(reader: Reader, history: History) -> bool:
    """Whether the newest topology and the newest fact of a node are shown."""
    shown = msgspec.json.decode(reader.get(f"{NODES}/{history.node}"), type=Detail).summary
    return (shown.revision, shown.seq) == (history.revision, history.state.seq)


def walk(reader: Reader, address: str) -> Iterator[tuple[str, Part]]:
    """Gets all pages of a list in turn. Yields the path of each, and the page."""
    first = path = f"{address}?limit={LIMIT}"
    while True:
        part = msgspec.json.decode(reader.get(path), type=Part)
        yield path, part
        if part.next is None:
            return
        path = f"{first}&continue={part.next}"
