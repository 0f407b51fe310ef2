"""
Requeues pending pods when resources become free without a change in the API server.

kube-scheduler retries a refused pod when an object of the cluster changes, otherwise after five minutes. No object
changes when a reservation expires, when a node is offered again, or when a kubelet frees the devices of a pod that
ended before. So this module changes an annotation of a node, which requeues all pending pods. It does so at most once
in five seconds, for all requests in this time, and never while no pod is pending.

The watch reports a pod later than the scheduler sees it. Therefore a request is kept while no pod is pending, and
executed if a pod is reported within `KEPT_SECONDS`:

    filter uses the old state -> the node changes: request, none pending -> filter refuses -> pod is reported: requeue
"""

from collections.abc import Collection

import anyio
import structlog

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.ports import KubernetesApi

PAUSE = 5.0
"""Seconds between two changes, failed ones included."""
KEPT_SECONDS = 60.0
"""How long a request is kept while no pod is pending: longer than a filter call and the delay of the watch."""

log = structlog.get_logger("topoalign.registry.scheduling")


class Requeue:
    """Requeues pending pods: `ask` requests it, and `run` does it."""

    def __init__(self, clock: Clock, waiting: Collection[str], nodes: Collection[NodeName]) -> None:
        """`waiting`: UIDs of the pending pods. `nodes`: the nodes of Kubernetes."""
        self.done = 0
        """Number of requeues."""
        self._clock = clock
        self._waiting = waiting
        self._nodes = nodes
        self._why = ""
        """The last open request; empty: none."""
        self._since = 0.0
        """Monotonic seconds of this request."""
        self._news = anyio.Event()

    def ask(self, why: str) -> None:
        """Requests a requeue, because refused pods may fit now. `why`: one word in the annotation, for operators."""
        self._why = why
        self._since = self._clock.monotonic()
        self._news.set()

    def note_waiting(self) -> None:
        """Notes that a pod is pending now."""
        if self._why:
            self._news.set()

    async def run(self, api: KubernetesApi) -> None:
        """Requeues pods on request until cancelled, by changes of nodes of this API server."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            if self._clock.monotonic() > self._since + KEPT_SECONDS:
                self._why = ""
            node = next(iter(self._nodes), None)
            if not self._why or not self._waiting or node is None:
                continue
            why = self._why
            self._why = ""
            try:
                await api.wake(node, f"{why} {self._clock.wall():.3f}")
                self.done += 1
            except TopoalignError as error:
                log.warning("waiting pods were not woken", node=node, finding=error.finding)
                self.ask(self._why or why)  # the request stays open
            await self._clock.sleep(PAUSE)
