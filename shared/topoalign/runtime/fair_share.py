"""
Divides a server fairly among its peers: chooses the next request to work on, and the connection to close at the limit.

A peer is an address. Each peer has an equal share of the time and of the connections, however many requests and
connections it has. What a peer does not use is left to the others.

**Time.** Requests work in short slices. The next slice is for the peer that has had the least time (start-time fair
queueing, Goyal, Vin and Cheng, 1996), and of its requests for the one that has had the least time (least attained service).
A peer that was idle may catch up `CATCH_UP_SECONDS` of the time that it did not use. Example: a peer has had large requests
in work for a while. The small request of another peer goes first, and so does its next one after a pause. Where it sends one
after the other without a pause, the two peers get slices in turn.

**Connections.** The peer with the most connections gives one up: the one that the server has waited for the longest.
Example: a request that has been coming for 3 s, however many bytes of it have come, is closed before a connection that has
been idle for a second, and both before one that was made a moment ago.

Nothing here does I/O or reads the time.
"""

from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush, merge
from itertools import chain, count
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

CATCH_UP_SECONDS = 0.05
"""The time of one call of a scheduler about thousands of nodes."""

Peer = tuple[str, ...]
"""The address of a peer. A second element gives some of its requests (probes) a share of their own."""


class ServedRequest:
    """A request under way; compared by identity."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.seconds = 0.0
        """Seconds that it has worked."""


R = TypeVar("R", bound=ServedRequest)


class FairQueue(Generic[R]):
    """Requests that wait for their next slice. A request is added again for each slice."""

    def __init__(self) -> None:
        self._waiting: dict[Peer, list[tuple[float, int, R]]] = {}
        """The requests of a peer as a heap: by the time that each has had, then in the order of `add`."""
        self._used: dict[Peer, float] = {}
        """Seconds at which a peer's next slice starts on a clock that only slices move."""
        self._now = 0.0
        """The start of the newest slice on that clock."""
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: R) -> None:
        """The request waits for a slice."""
        if request.peer not in self._waiting:
            self._waiting[request.peer] = []
            self._used[request.peer] = self._start(request.peer)
        heappush(self._waiting[request.peer], (request.seconds, next(self._numbers), request))

    def take(self) -> R:
        """Removes and returns the request whose slice is next; among equal peers that of the one that waits longest."""
        peer = min(self._waiting, key=self._used.__getitem__)
        self._now = max(self._now, self._used[peer])
        request = heappop(self._waiting[peer])[2]
        if not self._waiting[peer]:
            del self._waiting[peer]
        if len(self._used) > 2 * len(self._waiting) + 1:  # peers that were idle for long start like new ones
            oldest = self._now - CATCH_UP_SECONDS
            self._used = {each: used for each, used in self._used.items() if used > oldest or each in self._waiting}
        return request

    def charge(self, request: R, seconds: float) -> None:
        """The request, which does not wait, has worked for so long."""
        request.seconds += seconds
        self._used[request.peer] = self._start(request.peer) + seconds

    def _start(self, peer: Peer) -> float:
        return max(self._used.get(peer, 0.0), self._now - CATCH_UP_SECONDS)


class ServedConnection(Protocol):
    """A connection of a server."""

    @property
    def peer(self) -> Peer:
        """The peer that made it."""

    @property
    def since(self) -> float:
        """When the server began to wait for the peer, if it does."""

    def is_waited_for(self) -> bool:
        """Whether the server waits for the peer."""


P = TypeVar("P", bound=ServedConnection)


class OpenConnections(Generic[P]):
    """The connections of a server by peer, those of a peer in the order of `since`."""

    def __init__(self) -> None:
        self._by_peer: dict[Peer, dict[P, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_peer.values()))

    def __iter__(self) -> Iterator[P]:
        return chain.from_iterable(self._by_peer.values())

    def add(self, connection: P) -> None:
        """Adds a connection that was made now."""
        self._by_peer.setdefault(connection.peer, {})[connection] = None

    def discard(self, connection: P) -> None:
        """Removes a connection, if it is there."""
        held = self._by_peer.get(connection.peer, {})
        held.pop(connection, None)
        if not held:
            self._by_peer.pop(connection.peer, None)

    def renew(self, connection: P) -> None:
        """The server waits for the peer of this connection from now on."""
        held = self._by_peer.get(connection.peer, {})
        if connection in held:
            held[connection] = held.pop(connection)

    def first_to_close(self) -> P:
        """The connection that makes room for others. At least one is needed."""
        most = max(map(len, self._by_peer.values()))
        largest = [held for held in self._by_peer.values() if len(held) == most]
        by_age: Callable[[], Iterator[P]] = partial(merge, *largest, key=attrgetter("since"))
        return next((each for each in by_age() if each.is_waited_for()), None) or next(iter(by_age()))
