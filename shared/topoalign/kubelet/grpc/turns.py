"""
Decides the order in which connections are served.

One loop serves all connections of all resources, and bytes can arrive faster than they can be processed. So the work is
cut into steps of about a millisecond, one step runs in each round of the loop, and the connection with the fewest turns
comes first. A connection that was quiet has `CREDIT` turns ahead of busy ones, so a flood on other connections delays each
call of the kubelet by a step or two. Where nobody waits, the step runs at once and is that of the round.

The rule is start-time fair queueing (Goyal, Vin, Cheng 1996) with steps of equal cost.
"""

from asyncio import Future, get_running_loop
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

CREDIT = 8
"""Turns that a quiet connection has ahead of busy ones. A call is one or two turns; a large request has hundreds."""

Step = Callable[[], None]


class TurnTaker:
    """A connection that takes turns."""

    turn: int | None = None
    """The number of its next turn; None before the first. Equal numbers are served in the order in which they asked."""


class TurnQueue:
    """The steps that wait for their turn."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Step]] = []
        self._order = count()
        self._now = 0
        """The number of the turn that was served last."""
        self._scheduled = False
        """Whether a step is scheduled for the next round, or has run in this one."""

    def ask(self, client: TurnTaker, step: Step) -> None:
        """
        Runs `step` when it is the client's turn, in a later round of the loop, alone in that round.

        A client that is new comes behind those that wait: else a stream of new ones would keep the others waiting for ever.
        """
        heappush(self._waiting, (self._number(client), next(self._order), step))
        self._schedule()

    def take(self, client: TurnTaker) -> bool:
        """Whether it is the client's turn now: nobody waits, and no other turn has come in this round of the loop."""
        if self._scheduled:
            return False
        self._now = max(self._now, self._number(client))
        self._schedule()
        return True

    async def turn(self, client: TurnTaker) -> None:
        """Returns when it is the client's turn. What follows, up to the next await, is the step."""
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
        """Runs the step of this round, and schedules the next round, so that no other step runs in this one."""
        self._scheduled = False
        if not self._waiting:
            return
        number, _, step = heappop(self._waiting)
        self._now = max(self._now, number)
        self._schedule()
        step()
