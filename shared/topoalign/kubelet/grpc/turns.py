"""
Decides the order in which connections are served.

One event loop serves all connections of all resources, and bytes can arrive faster than they can be processed. So the
work is divided into steps of about a millisecond. Each iteration of the event loop runs one step. The connection with
the fewest turns is served first. A connection that was idle is `CREDIT` turns ahead of busy ones, so a flood on other
connections delays each call of the kubelet by only one or two steps. If no connection waits, a step runs at once, and
no other step runs in that iteration.

The rule is start-time fair queueing (Goyal, Vin, Cheng 1996) with steps of equal cost.
"""

from asyncio import Future, get_running_loop
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

CREDIT = 8
"""Turns by which an idle connection is ahead of busy ones. A call takes one or two turns, a large request hundreds."""

Step = Callable[[], None]


class TurnTaker:
    """A connection that takes turns."""

    turn: int | None = None
    """The number of its next turn; None before the first. Connections with equal numbers are served in FIFO order."""


class TurnQueue:
    """The steps that wait for their turn."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Step]] = []
        self._order = count()
        self._now = 0
        """The number of the turn that was served last."""
        self._scheduled = False
        """Whether a step is scheduled for the next iteration of the event loop, or has run in this one."""

    def ask(self, client: TurnTaker, step: Step) -> None:
        """
        Runs `step` when it is the client's turn: in a later iteration of the event loop, in which no other step runs.

        A new client is served after those that wait. Otherwise a stream of new clients could starve the others.
        """
        heappush(self._waiting, (self._number(client), next(self._order), step))
        self._schedule()

    def take(self, client: TurnTaker) -> bool:
        """Takes the client's turn now, and returns True, if no client waits and no step has run in this iteration."""
        if self._scheduled:
            return False
        self._now = max(self._now, self._number(client))
        self._schedule()
        return True

    async def turn(self, client: TurnTaker) -> None:
        """Waits for the client's turn. The caller's code up to its next await is the step."""
        future: Future[None] = get_running_loop().create_future()
        self.ask(client, lambda: None if future.done() else future.set_result(None))
        await future

    def _number(self, client: TurnTaker) -> int:
        """The number of the client's turn. The client's next turn gets a later number."""
        number = self._now + 1 if client.turn is None else max(client.turn, self._now - CREDIT)
        client.turn = number + 1
        return number

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Runs one step, and schedules itself for the next iteration, so that no other step runs in this one."""
        self._scheduled = False
        if not self._waiting:
            return
        number, _, step = heappop(self._waiting)
        self._now = max(self._now, number)
        self._schedule()
        step()
