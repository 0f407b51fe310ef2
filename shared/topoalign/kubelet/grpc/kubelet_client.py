"""Makes calls to a gRPC server on a unix socket, each with a deadline and one type of error."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
from grpclib.client import Channel
from grpclib.encoding.base import CodecBase
from grpclib.events import RecvMessage, listen
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from topoalign.core.model.errors import Unavailable, clean
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc.codec import QuickCodec, decode_received

T = TypeVar("T")

FAILURES = (OSError, asyncio.TimeoutError, GRPCError, StreamTerminatedError, ProtocolError, AssertionError)
"""The errors of a failed call: no connection, deadline, status, lost connection, invalid data, no answer (asserted)."""


AGAIN_SECONDS = 0.05
"""Seconds until a rejected call is repeated."""


class KubeletAway(Unavailable):
    """
    Raised when the kubelet is not there, does not answer in time, or refuses.

    Remedy: Check that the kubelet runs, and that the directory is its own.
    """

    code = "KubeletAway"

    def __init__(self, finding: str) -> None:
        super().__init__(finding, "see that the kubelet runs and that the directory is its own; this is tried again")


class Lost(Exception):
    """Raised by a call whose connection was lost, and which is to be repeated."""


class TurnedAway(Exception):
    """Raised by a call that an overloaded server has rejected, and which is to be repeated a moment later."""


async def call_once(
    path: Path, question: Callable[[Channel], Awaitable[T]], clock: Clock, within: float, codec: CodecBase | None = None
) -> T:
    """Makes one call over a connection of its own. Raises KubeletAway if there is no good answer within so many seconds."""
    channel = channel_to(path, codec)
    try:
        return await call_until_answered(path, partial(question, channel), clock, within)
    finally:
        channel.close()


def channel_to(path: Path, codec: CodecBase | None = None) -> Channel:
    """A channel to the server at this path, which connects with its first call and must be closed."""
    channel = Channel(path=str(path), codec=codec or QuickCodec())
    listen(channel, RecvMessage, decode_received)
    return channel


async def call_until_answered(path: Path, call: Callable[[], Awaitable[T]], clock: Clock, within: float) -> T:
    """
    Makes a call until it is answered. A call that raises Lost is repeated in a new task (`call_in_own_task` has the
    reason), and one that raises TurnedAway after `AGAIN_SECONDS`. Raises KubeletAway, about the socket at `path`, if there
    is no good answer within so many seconds.
    """
    answers: list[T] = []
    failure = f"no answer within {within:g} s"

    async def attempt() -> None:
        nonlocal failure
        try:
            answers.append(await call())
        except Lost:
            tasks.start_soon(attempt)
            return
        except TurnedAway as turned_away:
            failure = str(turned_away)
            await clock.sleep(AGAIN_SECONDS)
            tasks.start_soon(attempt)
            return
        except FAILURES as error:
            failure = describe_call_error(error)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(attempt)
        await clock.sleep(within)
        tasks.cancel_scope.cancel()
    if not answers:
        raise KubeletAway(f"the kubelet at {clean(str(path), 200)}: {failure}")
    return answers[0]


async def call_in_own_task(call: Callable[[], Awaitable[T]]) -> T:
    """
    Makes a call in a task of its own. Raises what the call fails with.

    grpclib ends a call whose connection is lost by cancelling the task that waits, and leaves it marked as cancelled
    (`asyncio.Task.cancelling`); in such a task no cancel scope would end properly any more.
    """
    answers: list[T] = []
    failures: list[BaseException] = []

    async def run() -> None:
        try:
            answers.append(await call())
        except FAILURES as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    if failures:
        raise failures[0]
    return answers[0]


def describe_call_error(error: BaseException) -> str:
    """Describes a failed call for people."""
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
