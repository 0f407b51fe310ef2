"""
Polls the kubelet for the owners of what was just granted, or is left of a former boot, without anybody waiting for it.

Allocate does not say for whom, and PodResources lists the devices as soon as the kubelet has recorded the answer. So it is
polled soon after a grant, and again at growing intervals until every grant has its owner. One poll serves all grants. The
interval grows with each poll, and is short again once there was no grant for `LONGEST_SECONDS`: while grants keep coming
there is one poll in that time, whether their owners are shown at once or late.

A kubelet that repeats its question is given the same allocation, which may have an owner: whether that is still who has the
devices is looked up once more.

A grant without an owner after `GIVE_UP_SECONDS` is left to the regular polls: the kubelet never shows the devices of an init
container that no later container takes over.

After a reboot the kubelet admits its pods with the devices that they had, and asks nobody. So records of a former boot are
looked for, too, when the agent starts, and for as long. The time while the kubelet does not answer, or the hardware and with
it the boot is not known, does not count.
"""

from collections.abc import Awaitable, Callable, Iterable

import anyio

from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import Allocation
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState

FIRST_SECONDS = 0.05
"""From a grant to the first poll. The kubelet records an answer to Allocate in a few milliseconds."""

LONGEST_SECONDS = 0.8
"""Between two polls: each interval is twice the one before, up to this."""

GIVE_UP_SECONDS = 5.0
"""For so long a record is looked for while the kubelet answers; then the regular polls alone look for it."""


class OwnerPolls:
    """The records whose owners are looked for, and the polls for them."""

    def __init__(self, clock: Clock, state: Callable[[], NodeState], poll: Callable[[], Awaitable[None]]) -> None:
        """
        `poll` compares the record with PodResources; it raises Unavailable. What `state` has now is looked for at once, if
        its owner is not known or it is from a former boot.
        """
        self._clock = clock
        self._state = state
        self._poll = poll
        self._waiting = dict.fromkeys(state().allocations, clock.monotonic() + GIVE_UP_SECONDS)
        """Until when the owner of each is looked for, in monotonic seconds."""
        self._is_repeated = False
        """Whether an allocation with an owner was given once more since the last poll."""
        self._expected = anyio.Event()
        self._expected.set()
        self._interval = FIRST_SECONDS
        self._granted = 0.0
        """Seconds until the next poll, and the monotonic second of the last grant."""

    def expect(self, granted: Iterable[Allocation]) -> None:
        """Has the owners looked for of these allocations, which were just given: new ones, or the same once more."""
        now = self._clock.monotonic()
        if not self._waiting and now >= self._granted + LONGEST_SECONDS:
            self._interval = FIRST_SECONDS
        self._granted = now
        for each in granted:
            if each.owner is None:
                self._waiting[each.id] = now + GIVE_UP_SECONDS
            else:
                self._is_repeated = True
        self._expected.set()

    async def run(self) -> None:
        """Polls whenever an owner is expected, until cancelled. A poll that fails is one that has not found it."""
        while True:
            await self._expected.wait()
            self._expected = anyio.Event()
            while self._still_waiting():
                await self._clock.sleep(self._interval)
                if self._still_waiting():
                    self._interval = min(2 * self._interval, LONGEST_SECONDS)
                    self._is_repeated = False
                    if not await self._is_answered():
                        self._waiting = dict.fromkeys(self._waiting, self._clock.monotonic() + GIVE_UP_SECONDS)

    async def _is_answered(self) -> bool:
        """Polls. False where that tells nothing: the kubelet does not answer, or the hardware is not known."""
        if self._state().topology is None:
            return False
        try:
            await self._poll()
        except Unavailable:
            return False
        return True

    def _still_waiting(self) -> bool:
        """Whether to poll. Drops the records that have ended, that were seen, or that were looked for long enough."""
        now = self._clock.monotonic()
        state = self._state()
        unseen = {name for name, held in state.allocations.items() if held.owner is None}
        unseen |= state.allocations.keys() if state.topology is None else {*state.stale}
        self._waiting = {name: until for name, until in self._waiting.items() if now <= until and name in unseen}
        return bool(self._waiting) or self._is_repeated
