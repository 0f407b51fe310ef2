"""
The ListAndWatch streams of one resource: the kubelet's, and those of other clients.

The kubelet opens its stream once, right after a registration, and drops the resource when that ends, whatever else is open.
So which stream is its own must be known. Every peer runs as root, but the kubelet is the process that serves
`kubelet.sock`, as far as its number can be seen from here (not from a container with process numbers of its own), and it is
the peer that dials back while a registration is going on. The stream that is most like it, and among equals the first since
the registration, is taken for its own. The others are served beside it, a few of them, and none ends another.

Source: kubelet v1.36.3, cm/devicemanager/plugin/v1beta1 `client.Run` and `runClient`.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import anyio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.kubelet.grpc.connection import Connection

MOST_OTHERS = 3
"""Streams beside the kubelet's: somebody who debugs it, and a monitor or two. Each may hold a list of all devices."""

END_SECONDS = 1.0


class Watch:
    """The state of one ListAndWatch stream, for those who wait for it or end it."""

    def __init__(self, connection: Connection | None = None, likeness: tuple[bool, bool] = (False, False)) -> None:
        self.connection = connection
        self.likeness = likeness
        """How much its peer is like the kubelet: whether it is that process, and whether it dialled back."""
        self.open = False
        self.ending = anyio.Event()
        self.ended = anyio.Event()
        self._waiting = anyio.CancelScope()

    def end(self) -> None:
        """Has the stream end where it waits, or before it waits again."""
        self.ending.set()
        self._waiting.cancel()

    async def wait(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Returns when `wait` does, or when the stream is to end. It costs no task: a stream waits after every fact."""
        if not self.ending.is_set():
            with anyio.CancelScope() as self._waiting:
                await wait()


class Watches:
    """The open ListAndWatch streams of a resource, and which of them is the kubelet's."""

    def __init__(self) -> None:
        self.kubelet = Watch()
        """The kubelet's: open, or ended, or none yet. It drops its newest client when an old stream ends: there is one."""
        self.when_ended: Callable[[], None] | None = None
        """Is called when a stream has ended."""
        self._others: set[Watch] = set()
        self._vacant = True
        """No stream has been taken for the kubelet's since the last registration began."""
        self._pid = 0
        self._registering = False
        self._dialled: WeakSet[Connection] = WeakSet()

    @property
    def open(self) -> bool:
        """Whether any stream is open."""
        return any(watch.open for watch in self._all())

    def _all(self) -> list[Watch]:
        return [self.kubelet, *self._others]

    @contextmanager
    def opened(self, connection: Connection | None) -> Iterator[Watch]:
        """Registers a stream for as long as the context is open. Raises GRPCError (RESOURCE_EXHAUSTED) for one too many."""
        process = connection is not None and connection.peer.pid == self._pid != 0
        watch = Watch(connection, (process, connection in self._dialled if connection is not None else False))
        if self._vacant or (self.kubelet.open and watch.likeness > self.kubelet.likeness):
            if self.kubelet.open:
                self._others.add(self.kubelet)
            self.kubelet = watch
            self._vacant = False
        elif len(self._others) < MOST_OTHERS:
            self._others.add(watch)
        else:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"at most {MOST_OTHERS} others listen beside the kubelet")
        watch.open = True
        try:
            yield watch
        finally:
            watch.open = False
            watch.ended.set()
            self._others.discard(watch)
            if self.when_ended is not None:
                self.when_ended()

    def dialled(self, connection: Connection | None) -> None:
        """Notes that this peer has asked for the options, as the kubelet does while it registers a plugin."""
        if self._registering and connection is not None:
            self._dialled.add(connection)

    @contextmanager
    def registering(self, pid: int) -> Iterator[None]:
        """Marks the time in which the kubelet, the process `pid` (0: not known), is asked to register the plugin."""
        self._pid = pid
        self._vacant = True
        self._registering = True
        self._dialled.clear()
        try:
            yield
        finally:
            self._registering = False

    def favour(self, connection: Connection) -> bool:
        """Whether the kubelet listens on this connection, or is about to."""
        dialling = self._registering and connection.peer.pid == self._pid != 0
        listening = self.kubelet.open and self.kubelet.connection is connection
        return dialling or listening or connection in self._dialled

    async def end(self) -> None:
        """Ends all open streams, and waits until they have ended, at most `END_SECONDS` because clients may hang."""
        for watch in self._all():
            watch.end()
        with anyio.move_on_after(END_SECONDS):
            for watch in self._all():
                if watch.open:
                    await watch.ended.wait()
