"""
Polls the kubelet in the background for the owners of new allocations and of allocations from before a reboot.

Allocate does not identify the container. PodResources reports it as soon as the kubelet has recorded the answer. So
PodResources is polled soon after a grant, and again at increasing intervals until every allocation has an owner. After
`GIVE_UP_SECONDS`, only the regular polls continue, because the container may be an init container, which is never
reported. After a reboot, the kubelet admits its pods without Allocate calls. So PodResources is also polled for the
owners of allocations from before the reboot.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import anyio

from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import Allocation
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState

FIRST_SECONDS = 0.05
"""Time from a grant to the first poll. The kubelet records an answer to Allocate in a few milliseconds."""

LONGEST_SECONDS = 0.8
"""Maximum time between two polls. Each interval is twice the previous one."""

GIVE_UP_SECONDS = 5.0
"""How long to poll for an owner while the kubelet answers. Afterwards, only the regular polls continue."""


class OwnerPolls:
    """Polls for the owners of allocations."""

    def __init__(self, clock: Clock, state: Callable[[], NodeState], poll: Callable[[], Awaitable[None]]) -> None:
        """
        `poll` compares the ledger with PodResources. It raises Unavailable. If `state` has allocations without an owner
        or from before a reboot, polls start immediately.
        """
        self._clock = clock
        self._state = state
        self._poll = poll
        self._waiting = dict.fromkeys(state().allocations, clock.monotonic() + GIVE_UP_SECONDS)
        """Allocation -> monotonic seconds until which to poll for its owner."""
        self._expected = anyio.Event()
        self._expected.set()
        self._interval = FIRST_SECONDS
        self._granted = 0.0
        """`_interval`: seconds until the next poll. `_granted`: monotonic seconds of the last grant."""

    def expect(self, granted: Iterable[Allocation]) -> None:
        """Starts polls for the owners of the allocations that have none yet."""
        now = self._clock.monotonic()
        if not self._waiting and now >= self._granted + LONGEST_SECONDS:
            self._interval = FIRST_SECONDS
        self._granted = now
        self._waiting.update({each.id: now + GIVE_UP_SECONDS for each in granted if each.owner is None})
        self._expected.set()

    async def run(self) -> None:
        """Polls while owners are expected, until cancelled. If a poll fails, the time limit restarts for all owners."""
        while True:
            await self._expected.wait()
            self._expected = anyio.Event()
            while self._still_waiting():
                await self._clock.sleep(self._interval)
                if self._still_waiting():
                    self._interval = min(2 * self._interval, LONGEST_SECONDS)
                    is_answered = False
                    if self._state().topology is not None:
                        with suppress(Unavailable):
                            await self._poll()
                            is_answered = True
                    if not is_answered:
                        self._waiting = dict.fromkeys(self._waiting, self._clock.monotonic() + GIVE_UP_SECONDS)

    def _still_waiting(self) -> bool:
        """Whether to poll. Removes allocations that are released, whose owner is known, or whose time has expired."""
        now = self._clock.monotonic()
        state = self._state()
        unseen = {name for name, held in state.allocations.items() if held.owner is None}
        unseen |= state.allocations.keys() if state.topology is None else {*state.stale}
        self._waiting = {name: until for name, until in self._waiting.items() if now <= until and name in unseen}
        return bool(self._waiting)
