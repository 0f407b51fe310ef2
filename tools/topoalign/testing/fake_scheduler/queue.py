"""
The pods that wait to be scheduled: ready, paused after an error, or refused and waiting for an event.

An event makes refused pods ready at once, also one that came while the pod was being tried: a pod that the extender refused
by any event, a pod that only lacked resources by an event after which a node may have more room. A pod that met an error is
ready after 1, 2, 4, 8 and then 10 s, whatever happens meanwhile (kube-scheduler v1.36.2, as recorded).
"""

from collections.abc import Iterable
from functools import partial

import anyio

from topoalign.core.ports import Clock
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.tasks import wait_for_first

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 10.0

Key = tuple[str, str]
"""Namespace and name of a pod."""


class SchedulingQueue:
    """Which pod is tried next: the highest priority first, then the one that has waited longest."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._priorities: dict[Key, int] = {}
        """Every pod that waits, whichever way."""
        self._ready: dict[Key, int] = {}
        """Pod -> its number in the order in which pods became ready."""
        self._paused: dict[Key, float] = {}
        """Pod -> monotonic second at which it is ready again."""
        self._errors: dict[Key, int] = {}
        """Pod -> errors in a row."""
        self._lacking: set[Key] = set()
        """Refused pods for which no node had room, so that no extender was called."""
        self._numbers = 0
        self._events = 0
        self._room_events = 0
        """Those of the events after which a node may have more room."""
        self._tried: tuple[Key, int, int] | None = None
        """The pod that is being tried, and how many events of either kind there had been."""
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._priorities)

    def add(self, pod: Key, priority: int = 0) -> None:
        """A pod that waits was created or changed: it is tried again, unless it is paused or being tried."""
        self._priorities[pod] = priority
        if pod in self._paused:
            return
        if self._tried is not None and self._tried[0] == pod:
            self._events += 1
            self._room_events += 1
        else:
            self._make_ready([pod])

    def remove(self, pod: Key) -> None:
        """The pod waits no more: it is bound, or gone."""
        for each in (self._priorities, self._ready, self._paused, self._errors):
            each.pop(pod, None)
        self._lacking.discard(pod)

    def wake(self, *, has_room: bool = True) -> None:
        """Something has happened by which refused pods may fit. `has_room`: a node may have more room than before."""
        self._events += 1
        self._room_events += has_room
        tried = self._tried[0] if self._tried is not None else None
        self._make_ready(
            pod
            for pod in self._priorities
            if pod not in self._paused and pod != tried and (has_room or pod not in self._lacking)
        )

    async def next(self) -> Key:
        """The pod to try, once there is one. Until `refuse`, `fail` or `remove` is called for it, it is being tried."""
        while True:
            self._resume()
            if self._ready:
                pod = min(self._ready, key=lambda each: (-self._priorities[each], self._ready[each]))
                del self._ready[pod]
                self._lacking.discard(pod)
                self._tried = pod, self._events, self._room_events
                return pod
            self._changed = anyio.Event()
            if not self._paused:
                await self._changed.wait()
            else:
                pause = max(0.0, min(self._paused.values()) - self._clock.monotonic())
                await wait_for_first(self._changed.wait, partial(self._clock.sleep, pause))

    def refuse(self, pod: Key, *, by_extender: bool = True) -> None:
        """The pod that was tried fits nowhere: it waits for an event, which may have come meanwhile."""
        tried = self._tried
        self._tried = None
        self._errors.pop(pod, None)
        if pod not in self._priorities or tried is None:
            return
        if not by_extender:
            self._lacking.add(pod)
        before, now = (tried[1], self._events) if by_extender else (tried[2], self._room_events)
        if before != now:
            self._make_ready([pod])

    def assume(self, pod: Key) -> None:
        """The pod that was tried has a node, and waits no more unless binding it fails."""
        self._tried = None
        self._priorities.pop(pod, None)

    def fail(self, pod: Key, priority: int = 0) -> None:
        """Trying the pod, or binding it, met an error: it waits for a while."""
        if self._tried is not None and self._tried[0] == pod:
            self._tried = None
        self._priorities[pod] = priority
        self._errors[pod] = self._errors.get(pod, 0) + 1
        self._ready.pop(pod, None)
        self._paused[pod] = self._clock.monotonic() + backoff_seconds(self._errors[pod], FIRST_PAUSE, LONGEST_PAUSE)
        self._changed.set()

    def _resume(self) -> None:
        now = self._clock.monotonic()
        over = [pod for pod, until in self._paused.items() if until <= now]
        for pod in over:
            del self._paused[pod]
        self._make_ready(over)

    def _make_ready(self, pods: Iterable[Key]) -> None:
        for pod in pods:
            if pod not in self._ready:
                self._numbers += 1
                self._ready[pod] = self._numbers
                self._changed.set()
