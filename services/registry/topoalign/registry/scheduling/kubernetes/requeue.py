"""
Wakes the pods that wait, when something happens that the API server does not show.

kube-scheduler tries a refused pod again when an object of the cluster changes; else after five minutes. That a reservation
has expired, that a node is offered again, or that its kubelet has given back what a pod had whose end was shown before,
changes no object: so an annotation of a node is changed. Each such change
wakes all pods that wait, so there is at most one in five seconds, and none while no pod waits. What is asked for meanwhile
is done together.

A pod is shown some time after the scheduler has it, so it may be refused by what was true before, and not be shown yet when
this changes. So what is asked for while no pod waits is done if a pod is shown within `KEPT_SECONDS`.

    filter, by the node as it is -> the node changes: asked, no pod waits -> the filter refuses -> the pod is shown: woken
"""

from collections.abc import Callable, Iterable

import anyio
import structlog

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.ports import KubernetesApi

# Bounds how often something is done: so many at once, and then so many in a while.


class RequeueBucket:
    """
    A token bucket of `most` tokens, which fills up within `seconds`.

    Example: 6 in 60 s allows six at once, and then one every ten seconds.
    """

    def __init__(self, clock: Clock, most: int, seconds: float) -> None:
        self._clock = clock
        self._most = most
        self._each = seconds / most
        self._full_at = clock.monotonic()
        """When all tokens will be there."""

    def take(self) -> bool:
        """Takes a token; False if there is none."""
        if self.wait() > 0:
            return False
        self._full_at = max(self._full_at, self._clock.monotonic()) + self._each
        return True

    def wait(self) -> float:
        """Seconds until there is a token."""
        missing = max(0.0, self._full_at - self._clock.monotonic())
        return max(0.0, missing - (self._most - 1) * self._each)


PAUSE = 5.0
"""Seconds between two changes, failed ones included."""
KEPT_SECONDS = 60.0
"""For which what was asked for while no pod waited counts: longer than a filter takes, and than a pod is shown late."""

log = structlog.get_logger("topoalign.registry.scheduling")


class WakeUps:
    """Asked for by anybody; `run` does them."""

    def __init__(
        self, api: KubernetesApi, clock: Clock, *, waiting: Callable[[], bool], nodes: Callable[[], Iterable[NodeName]]
    ) -> None:
        """`waiting`: whether any pod waits. `nodes`: those that Kubernetes has."""
        self.done = 0
        """How often pods were woken."""
        self._api = api
        self._clock = clock
        self._waiting = waiting
        self._nodes = nodes
        self._why = ""
        self._since = 0.0
        """What was asked for last and is not done, and when: monotonic seconds."""
        self._news = anyio.Event()

    def ask(self, why: str) -> None:
        """Pods that were refused may fit now. `why` is a word for people who look at the node."""
        self._why = why
        self._since = self._clock.monotonic()
        self._news.set()

    def show(self) -> None:
        """A pod waits that did not wait before."""
        if self._why:
            self._news.set()

    async def run(self) -> None:
        """Wakes pods when it is asked for, for ever."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            if self._clock.monotonic() > self._since + KEPT_SECONDS:
                self._why = ""
            if self._why and self._waiting() and await self._wake():
                await self._clock.sleep(PAUSE)

    async def _wake(self) -> bool:
        """Returns whether anything was tried. What fails is asked for again."""
        node = next(iter(self._nodes()), None)
        if node is None:
            return False
        why = self._why
        self._why = ""
        try:
            await self._api.wake(node, f"{why} {self._clock.wall():.3f}")
            self.done += 1
        except TopoalignError as error:
            log.warning("waiting pods were not woken", node=node, finding=error.finding)
            self.ask(self._why or why)
        return True
