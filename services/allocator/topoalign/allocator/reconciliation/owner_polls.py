"""
Polls the kubelet for the owners of what was just granted, without anybody waiting for it.

Allocate does not say for whom, and PodResources lists the devices as soon as the kubelet has recorded the answer. So it is
polled soon after a grant, and again at growing intervals until every grant has its owner. One poll serves all grants, and a
new grant does not shorten an interval that has begun to grow: under load there is one poll in `LONGEST_SECONDS`.

A grant without an owner after `GIVE_UP_SECONDS` is left to the regular polls: the kubelet never shows the devices of an init
container that no later container takes over.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import anyio

from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState

FIRST_SECONDS = 0.05
"""From a grant to the first poll. The kubelet records an answer to Allocate in a few milliseconds."""

LONGEST_SECONDS = 0.8
"""Between two polls: each interval is twice the one before, up to this."""

GIVE_UP_SECONDS = 5.0
"""How long a grant may stay without an owner before the regular polls alone look for it."""


class OwnerPolls:
    """The grants whose owners are looked for, and the polls for them."""

    def __init__(self, clock: Clock, state: Callable[[], NodeState], poll: Callable[[], Awaitable[None]]) -> None:
        """`poll` compares the record with PodResources; it raises Unavailable."""
        self._clock, self._state, self._poll = clock, state, poll
        self._waiting: dict[AllocationID, float] = {}
        """Until when the owner of each is looked for, in monotonic seconds."""
        self._expected = anyio.Event()

    def expect(self, granted: Iterable[Allocation]) -> None:
        """Has the owners of these allocations looked for, of those that have none."""
        until = self._clock.monotonic() + GIVE_UP_SECONDS
        self._waiting.update((each.id, until) for each in granted if each.owner is None)
        if self._waiting:
            self._expected.set()

    async def run(self) -> None:
        """Polls whenever an owner is expected, until cancelled. A poll that fails is one that has not found it."""
        while True:
            await self._expected.wait()
            self._expected = anyio.Event()
            interval = FIRST_SECONDS
            while self._waiting:
                await self._clock.sleep(interval)
                interval = min(2 * interval, LONGEST_SECONDS)
                if self._still_waiting():
                    with suppress(Unavailable):
                        await self._poll()

    def _still_waiting(self) -> bool:
        """Drops the grants that have ended, have their owner, or have been looked for long enough."""
        now, live = self._clock.monotonic(), self._state().allocations
        self._waiting = {
            name: until
            for name, until in self._waiting.items()
            if now <= until and (held := live.get(name)) is not None and held.owner is None
        }
        return bool(self._waiting)
