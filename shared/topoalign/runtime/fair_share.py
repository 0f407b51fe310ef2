"""
Shares a server fairly among its peers: chooses the request that runs next, and the connection to close at the limit.

A peer is an address. Each peer has an equal share of the time and of the connections, regardless of how many requests
and connections it has. Other peers can use what a peer does not use.

**Time.** Requests run in short slices. The next slice goes to the peer that has used the least time (start-time fair
queueing, Goyal, Vin and Cheng, 1996), and among its requests to the one that has used the least time (least attained
service). A peer that was idle can catch up on at most `CATCH_UP_SECONDS` of unused time. Example: one peer has been
running large requests for a while. A small request of another peer runs first, and after a pause, so does its next one.
If the other peer sends one request after another without a pause, the slices alternate between the two peers.

**Connections.** At the limit, the peer with the most connections loses one: that on which the server has waited longest
for the peer. Example: a request has been arriving for 3 s, no matter how many bytes have arrived. Its connection is
closed before one that has been idle for 1 s, and both are closed before a new one.

This module does no I/O and does not read the time.
"""

from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush, merge
from itertools import chain, count
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

CATCH_UP_SECONDS = 0.01
"""Two slices. With more, a peer with hundreds of clients would run first after each pause, and delay all others."""

Peer = tuple[str, ...]
"""The address of a peer. A second element gives some of its requests (probes) their own share."""


class ServedRequest:
    """A request in progress; compared by identity."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.seconds = 0.0
        """Seconds that it has run."""


R = TypeVar("R", bound=ServedRequest)


class FairQueue(Generic[R]):
    """Requests that wait for their next slice. A request is added again for each slice."""

    def __init__(self) -> None:
        self._waiting: dict[Peer, list[tuple[float, int, R]]] = {}
        """Peer -> a heap of its requests, ordered by the time that each has used, then in the order of `add`."""
        self._used: dict[Peer, float] = {}
        """Peer -> the virtual time in seconds at which its next slice starts."""
        self._now = 0.0
        """The virtual time: the start of the newest slice."""
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: R) -> None:
        """Adds a request that waits for a slice."""
        if request.peer not in self._waiting:
            self._waiting[request.peer] = []
            self._used[request.peer] = self._start(request.peer)
        heappush(self._waiting[request.peer], (request.seconds, next(self._numbers), request))

    def take(self) -> R:
        """Removes and returns the request that runs next; among equal peers, that of the peer that waited longest."""
        peer = min(self._waiting, key=self._used.__getitem__)
        self._now = max(self._now, self._used[peer])
        request = heappop(self._waiting[peer])[2]
        if not self._waiting[peer]:
            del self._waiting[peer]
        if len(self._used) > 2 * len(self._waiting) + 1:  # peers that were idle for a long time start like new ones
            oldest = self._now - CATCH_UP_SECONDS
            self._used = {each: used for each, used in self._used.items() if used > oldest or each in self._waiting}
        return request

    def charge(self, request: R, seconds: float) -> None:
        """Records that a request, which is not in the queue, has run for this many seconds."""
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
    """The connections of a server by peer, for each peer in the order of `since`."""

    def __init__(self) -> None:
        self._by_peer: dict[Peer, dict[P, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_peer.values()))

    def __iter__(self) -> Iterator[P]:
        return chain.from_iterable(self._by_peer.values())

    def add(self, connection: P) -> None:
        """Adds a new connection."""
        self._by_peer.setdefault(connection.peer, {})[connection] = None

    def discard(self, connection: P) -> None:
        """Removes a connection, if it is there."""
        held = self._by_peer.get(connection.peer, {})
        held.pop(connection, None)
        if not held:
            self._by_peer.pop(connection.peer, None)

    def renew(self, connection: P) -> None:
        """Records that the server waits for the peer of this connection from now on."""
        held = self._by_peer.get(connection.peer, {})
        if connection in held:
            held[connection] = held.pop(connection)

    def first_to_close(self) -> P:
        """The connection to close so that there is room for another one. There must be at least one."""
        most = max(map(len, self._by_peer.values()))
        largest = [held for held in self._by_peer.values() if len(held) == most]
        by_age: Callable[[], Iterator[P]] = partial(merge, *largest, key=attrgetter("since"))
        return next((each for each in by_age() if each.is_waited_for()), None) or next(iter(by_age()))
