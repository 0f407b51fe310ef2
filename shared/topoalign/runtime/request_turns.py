"""
Runs the requests of a process in turns: each runs in slices, in the order of `fair_share.FairQueue`.

A slice ends when the request waits for anything; in a long computation, a request yields after `LONGEST_SECONDS`. After
each slice, sockets are read and other tasks continue, so a request that has arrived meanwhile can have the next slice.
While a request waits for something else, it blocks no other request and is not charged.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from time import monotonic

import anyio.lowlevel

from topoalign.core.ports import Clock
from topoalign.runtime.fair_share import FairQueue, Peer, ServedRequest

LONGEST_SECONDS = 0.005
"""Maximum length of a slice: a tenth of an acceptable delay, because several tasks can have long computations."""
ARRIVAL_ITERATIONS = 3
"""Iterations of the event loop from the arrival of a request until it is in the queue."""


class RequestTurns:
    """The turns of all requests in an event loop. All its servers use one object, because they share its time."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._queue: FairQueue[Working] = FairQueue()
        self._current: Working | None = None
        self._began = 0.0
        self._is_due = False
        """Whether `_give` is called in the next iteration of the event loop."""

    async def wait(self, request: "Working") -> None:
        """Waits for the next slice of this request."""
        request.turn = asyncio.get_running_loop().create_future()
        self._queue.add(request)
        if not self._is_due:
            self._give_after(0)
        await request.turn
        self._began = self._clock()

    def is_in_time(self, request: "Working") -> bool:
        """Whether this request has the current slice and may continue."""
        return self._current is request and self._clock() < self._began + LONGEST_SECONDS

    def charge(self, request: "Working", seconds: float) -> None:
        """Charges the request for work outside of its slices."""
        self._queue.charge(request, seconds)

    def _give_after(self, iterations: int) -> None:
        """Calls `_give` after this many further iterations of the event loop."""
        self._is_due = True
        again = partial(self._give_after, iterations - 1) if iterations else self._give
        asyncio.get_running_loop().call_soon(again)

    def _give(self) -> None:
        """Ends the current slice, and wakes the request that has the next one."""
        if self._current is not None:
            self._queue.charge(self._current, self._clock() - self._began)
            self._current = None
        self._is_due = False
        while self._queue and self._current is None:
            request = self._queue.take()
            if not request.turn.done():  # otherwise it was cancelled
                request.turn.set_result(None)
                self._current = request
                self._began = self._clock()
                self._give_after(ARRIVAL_ITERATIONS)


class Working(ServedRequest):
    """A request whose task takes turns with the tasks of other requests."""

    turn: "asyncio.Future[None]"

    def __init__(self, peer: Peer, turns: RequestTurns) -> None:
        super().__init__(peer)
        self._turns = turns
        self.outlives_connection = False
        """Whether its task continues if its connection is lost."""

    async def give(self) -> bool:
        """Waits for the next slice unless the current one may continue; returns whether it has waited."""
        if self._turns.is_in_time(self):
            return False
        await self._turns.wait(self)
        return True


WORKING: ContextVar[Working | None] = ContextVar("WORKING", default=None)
"""The request that a task answers."""


async def take_turn() -> bool:
    """Lets other tasks run if this task's slice has lasted too long. Returns whether they ran."""
    if (working := WORKING.get()) is not None:
        return await working.give()
    await anyio.lowlevel.checkpoint()
    return True


def outlive_connection() -> None:
    """Lets this task finish if its client disconnects, because its work for the request has effects."""
    if (working := WORKING.get()) is not None:
        working.outlives_connection = True


class TaskTurns:
    """
    Yields to the event loop during a task's long computation: the task calls `give` between two steps.

    A task whose next message is always available never waits, and would block the event loop without turns. A task that
    answers a request continues at the turn of that request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()

    async def give(self) -> None:
        """Lets other tasks run if this one has run for `LONGEST_SECONDS` since the last time."""
        if self._clock.monotonic() < self._began + LONGEST_SECONDS:
            return
        if await take_turn():
            self._began = self._clock.monotonic()
