"""
Keeps a connection to a gRPC server on a unix socket between calls.

The kubelet's PodResources is polled, and a connection costs more than a call. It is opened with the first call, and opened
again after a failure, after a loss, after `MOST_CALLS`, and if there is another socket at the path, as after a restart of
the kubelet. Calls at the same time share it. After a call that failed, later calls do not use it any more; it is closed
when the last call over it has ended.

A call over a connection that has answered before may fail only because the server has closed it since. Such a call is
repeated over a new connection, so only calls that may be repeated are made here.

The kubelet answers 100 calls a second of all its clients together, and ten at once; it rejects the others. The connection
is good all the same, and such a call is repeated a moment later.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from grpclib.client import Channel, Stream
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError

from topoalign.core.ports import Clock
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.kubelet_client import Lost, TurnedAway, call_until_answered, channel_to, describe_call_error

T = TypeVar("T")

MOST_CALLS = 1_000
"""Over one connection. Its HTTP/2 state remembers each of its last 65,536 calls, which would be 9 MB."""


class KeptChannel:
    """Calls the server at one path, over one connection for as long as it lasts. `close` ends it."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._kept: SharedChannel | None = None
        """The channel of the next call; None: it opens a new one."""

    async def ask(
        self, question: Callable[[Channel], Awaitable[T]], within: float, codec: CodecBase | None = None
    ) -> T:
        """
        Asks over the kept connection; `codec` is for this question alone. Raises KubeletAway if there is no good answer
        within so many seconds.
        """

        async def call() -> T:
            with self._lent() as connection:
                try:
                    return await question(connection.channel if codec is None else connection.with_codec(codec))
                except StreamTerminatedError as error:
                    if connection.has_answered:
                        raise Lost from error
                    raise
                except GRPCError as error:
                    if error.status is Status.RESOURCE_EXHAUSTED:
                        raise TurnedAway(describe_call_error(error)) from error
                    raise

        return await call_until_answered(self.path, call, self._clock, within)

    def close(self) -> None:
        """Ends the connection, at once if no call uses it."""
        kept = self._kept
        self._kept = None
        if kept is not None:
            kept.close_unused()

    @contextmanager
    def _lent(self) -> Iterator["SharedChannel"]:
        """The connection, for one call."""
        identity = unix_sockets.identity(self.path)
        if self._kept is not None and (self._kept.identity != identity or self._kept.begun >= MOST_CALLS):
            self.close()
        if self._kept is None:
            self._kept = SharedChannel(channel_to(self.path), identity)
        lent = self._kept
        lent.calls += 1
        lent.begun += 1
        succeeded = False
        try:
            yield lent
            succeeded = lent.has_answered = True
        except TurnedAway:
            succeeded = lent.has_answered = True
            raise
        finally:
            lent.calls -= 1
            if not succeeded and self._kept is lent:
                self._kept = None
            if self._kept is not lent:
                lent.close_unused()


class SharedChannel:
    """A channel that calls share."""

    def __init__(self, channel: Channel, identity: unix_sockets.Identity | None) -> None:
        """`identity`: of the socket when the channel was made."""
        self.channel = channel
        self.identity = identity
        self.calls = self.begun = 0
        """Calls under way, and all calls so far."""
        self.has_answered = False

    def with_codec(self, codec: CodecBase) -> Channel:
        """The channel for one call with a codec of its own."""
        return cast(Channel, CodedChannel(self.channel, codec))

    def close_unused(self) -> None:
        """Closes the channel unless a call is under way."""
        if not self.calls:
            self.channel.close()


class CodedChannel:
    """A channel as a generated stub uses it, with another codec."""

    def __init__(self, channel: Channel, codec: CodecBase) -> None:
        self._channel = channel
        self._codec = codec

    def request(self, *arguments: Any, **options: Any) -> Stream[Any, Any]:
        """As `Channel.request`."""
        stream = self._channel.request(*arguments, **options)
        stream._codec = self._codec
        return stream
