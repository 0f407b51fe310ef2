"""
Makes calls to a gRPC server on a unix socket, each with a deadline and one type of error.

`call_once` opens a connection for one call. `KeptChannel` keeps its connection, because the kubelet's PodResources is
polled, and a connection costs more than a call.

The kubelet limits PodResources calls to 100 a second with a burst of 10, for all clients together, and rejects the
others. The connection remains usable, and a rejected call is repeated after a short delay.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol

from topoalign.core.model.errors import Unavailable, clean
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.decoding import CODEC

T = TypeVar("T")

FAILURES = (OSError, asyncio.TimeoutError, GRPCError, StreamTerminatedError, ProtocolError, AssertionError)
"""
The errors of a failed call: no connection, deadline exceeded, error status, lost connection, invalid data, and no
answer (betterproto2 asserts that there is one).
"""

AGAIN_SECONDS = 0.05
"""Seconds until a rejected call is repeated."""

MOST_CALLS = 1_000
"""Maximum number of calls over one connection. Its HTTP/2 state keeps the last 65,536 calls, which would take 9 MB."""

DECODED_AT_ONCE = 2**10
"""Maximum size in bytes of an answer that is decoded in the event loop: 500 of the smallest fields, 1 to 2 ms."""


class KubeletAway(Unavailable):
    """
    Raised when the kubelet does not answer in time, or rejects the call.

    Remedy: Check that the kubelet runs, and that the directory is its own.
    """

    def __init__(self, finding: str) -> None:
        super().__init__(finding, "see that the kubelet runs and that the directory is its own; this is tried again")


class Lost(Exception):
    """Raised by a call whose connection was lost. The call is to be repeated."""


class TurnedAway(Exception):
    """Raised by a call that an overloaded server has rejected. The call is to be repeated after a short delay."""


class KubeletChannel(Channel):
    """A channel whose calls raise StreamTerminatedError if the server closes the connection before the request."""

    async def __connect__(self) -> H2Protocol:
        protocol = await super().__connect__()
        if protocol.processor.connection.is_closing():  # grpclib itself would fail with an AttributeError
            raise StreamTerminatedError("Connection lost")
        return protocol


async def call_once(path: Path, question: Callable[[Channel], Awaitable[T]], clock: Clock, within: float) -> T:
    """Makes one call over a separate connection. Raises KubeletAway if it does not succeed within `within` seconds."""
    channel = KubeletChannel(path=str(path), codec=CODEC)
    try:
        return await call_until_answered(path, partial(question, channel), clock, within)
    finally:
        channel.close()


async def call_until_answered(path: Path, call: Callable[[], Awaitable[T]], clock: Clock, within: float) -> T:
    """
    Makes a call, and repeats it: at once if it raises Lost, and after `AGAIN_SECONDS` if it raises TurnedAway.

    Raises KubeletAway with `path` if the call fails otherwise, or is not answered within `within` seconds.
    """
    answers: list[T] = []
    failure = f"no answer within {within:g} s"

    async def attempt() -> None:
        nonlocal failure
        while True:
            try:
                answers.append(await call_in_own_task(call))
            except Lost:
                continue
            except TurnedAway as turned_away:
                failure = str(turned_away)
                await clock.sleep(AGAIN_SECONDS)
                continue
            except FAILURES as error:
                failure = describe_call_error(error)
            tasks.cancel_scope.cancel()
            return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attempt)
        await clock.sleep(within)
        tasks.cancel_scope.cancel()
    if not answers:
        raise KubeletAway(f"the kubelet at {clean(str(path), 200)}: {failure}")
    return answers[0]


async def call_in_own_task(call: Callable[[], Awaitable[T]]) -> T:
    """
    Makes a call in a separate task. Raises the error of the call.

    If the connection is lost, grpclib cancels the task that waits for the call. The task then stays marked as cancelled
    (`asyncio.Task.cancelling`), and cancel scopes no longer work correctly in it.
    """
    answers: list[T] = []
    failures: list[Exception] = []

    async def run() -> None:
        try:
            answers.append(await call())
        except (Lost, TurnedAway, *FAILURES) as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    if failures:
        raise failures[0]
    return answers[0]


def describe_call_error(error: BaseException) -> str:
    """Describes the error of a failed call, as text for error messages."""
    match error:
        case GRPCError():
            return f"{error.status.name} {clean(error.message or '', 300)}".rstrip()
        case FileNotFoundError():
            return "its socket is not there"
        case ConnectionRefusedError():
            return "nobody serves its socket"
        case OSError():
            return error.strerror or clean(str(error), 300) or type(error).__name__
        case _:
            return clean(str(error), 300) or type(error).__name__


class UndecodedCodec(ProtoCodec):
    """Encodes requests, and returns answers as bytes."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The bytes of the answer."""
        return data


class SharedChannel:
    """A channel that calls share."""

    def __init__(self, path: Path, identity: unix_sockets.Identity | None) -> None:
        """`identity`: the identity of the socket that is at this path now; None if there is none."""
        self.channel = KubeletChannel(path=str(path), codec=UndecodedCodec())
        self.identity = identity
        self.running = self.begun = 0
        """Calls under way, and all calls so far."""
        self.has_answered = False

    def close_unused(self) -> None:
        """Closes the channel unless a call is under way."""
        if not self.running:
            self.channel.close()


class KeptChannel:
    """Makes calls to the server at one path. All calls, also concurrent ones, share a connection while it lasts."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._kept: SharedChannel | None = None
        """The channel for the next call; None: the next call opens one."""

    async def ask(self, question: Callable[[Channel], Awaitable[Any]], within: float, read: Callable[[bytes], T]) -> T:
        """
        Makes a call over the kept connection, and decodes the answer with `read`.

        `question` makes the call and returns the answer as bytes; it can be called more than once. `read` raises
        GRPCError for an invalid answer. Raises KubeletAway if the call does not succeed within `within` seconds.
        """

        async def call() -> T:
            with self._lent() as connection:
                try:
                    answer = await question(connection.channel)
                    if len(answer) <= DECODED_AT_ONCE:
                        return read(answer)
                    # decoding is pure Python, and a large answer would block the event loop
                    return await to_thread.run_sync(read, answer)
                except StreamTerminatedError as error:
                    # if earlier calls succeeded, the server may have closed the connection while it was idle
                    if connection.has_answered:
                        raise Lost from error
                    raise
                except GRPCError as error:
                    if error.status is Status.RESOURCE_EXHAUSTED:
                        raise TurnedAway(describe_call_error(error)) from error
                    raise

        return await call_until_answered(self.path, call, self._clock, within)

    def close(self) -> None:
        """Closes the connection: now if no call uses it, otherwise after the last call."""
        kept = self._kept
        self._kept = None
        if kept is not None:
            kept.close_unused()

    @contextmanager
    def _lent(self) -> Iterator[SharedChannel]:
        # after a restart of the kubelet, another socket is at the path
        identity = unix_sockets.identity(self.path)
        if self._kept is not None and (self._kept.identity != identity or self._kept.begun >= MOST_CALLS):
            self.close()
        if self._kept is None:
            self._kept = SharedChannel(self.path, identity)
        lent = self._kept
        lent.running += 1
        lent.begun += 1
        succeeded = False
        try:
            yield lent
            succeeded = lent.has_answered = True
        except TurnedAway:
            succeeded = lent.has_answered = True
            raise
        finally:
            lent.running -= 1
            # after a failed call, later calls use a new connection; this one is closed after its last call
            if not succeeded and self._kept is lent:
                self._kept = None
            if self._kept is not lent:
                lent.close_unused()
