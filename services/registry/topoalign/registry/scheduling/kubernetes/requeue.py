"""
Requeues waiting pods when resources become free without a change in the API server.

kube-scheduler retries a refused pod when an object of the cluster changes, else after five minutes. No object changes when a
reservation expires, when a node is offered again, or when a kubelet frees the devices of a pod that ended before. So an
annotation of a node is changed. Each change requeues all waiting pods. So there is at most one change in five seconds,
for all requests in this time, and none while no pod waits.

The watch reports a pod some time after the scheduler has it. So the filter may refuse a pod by an old state, and the
state may change before the pod is reported. Therefore a request without a waiting pod is kept, and done if a pod is
reported within `KEPT_SECONDS`.

    filter by the old state -> the node changes: request, no pod waits -> the filter refuses -> the pod is reported: requeue
"""

from collections.abc import Collection

import anyio
import structlog

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.ports import KubernetesApi


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
        """Monotonic seconds at which the bucket is full."""

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
"""How long a request without a waiting pod counts: longer than a filter call and the delay of the watch."""

log = structlog.get_logger("topoalign.registry.scheduling")


class Requeue:
    """Requeues waiting pods on request; `run` it."""

    def __init__(self, clock: Clock, waiting: Collection[str], nodes: Collection[NodeName]) -> None:
        """`waiting`: UIDs of the pods that wait. `nodes`: those of Kubernetes."""
        self.done = 0
        """How often pods were requeued."""
        self._clock = clock
        self._waiting = waiting
        self._nodes = nodes
        self._why = ""
        self._since = 0.0
        """The last open request, and its monotonic seconds."""
        self._news = anyio.Event()

    def ask(self, why: str) -> None:
        """Requests a requeue, because refused pods may fit now. `why` is a word for operators who look at the node."""
        self._why = why
        self._since = self._clock.monotonic()
        self._news.set()

    def show(self) -> None:
        """Takes a pod that waits now."""
        if self._why:
            self._news.set()

    async def run(self, api: KubernetesApi) -> None:
        """Requeues pods on request until cancelled, by changes of nodes of this API server."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            if self._clock.monotonic() > self._since + KEPT_SECONDS:
                self._why = ""
            if self._why and self._waiting and await self._requeue(api):
                await self._clock.sleep(PAUSE)

    async def _requeue(self, api: KubernetesApi) -> bool:
        """Changes an annotation. Returns whether it tried. A failure leaves the request open."""
        node = next(iter(self._nodes), None)
        if node is None:
            return False
        why = self._why
        self._why = ""
        try:
            await api.wake(node, f"{why} {self._clock.wall():.3f}")
            self.done += 1
        except TopoalignError as error:
            log.warning("waiting pods were not woken", node=node, finding=error.finding)
            self.ask(self._why or why)
        return True
