"""
Wakes the pods that wait, when something happens that the API server does not show.

kube-scheduler tries a refused pod again when an object of the cluster changes; else after five minutes. That a reservation
has expired, that a node is offered again, or that its kubelet has given back what a pod had whose end was shown before,
changes no object: so an annotation of a node is changed. Each such change
wakes all pods that wait, so there is at most one in five seconds, and none while no pod waits. What is asked for meanwhile
is done together.
"""

from collections.abc import Callable, Iterable

import anyio
import structlog

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.ports import KubernetesApi

PAUSE = 5.0
"""Seconds between two changes, failed ones included."""

log = structlog.get_logger("topoalign.registry.scheduling")


class WakeUps:
    """Asked for by anybody; `run` does them."""

    def __init__(
        self, api: KubernetesApi, clock: Clock, *, waiting: Callable[[], bool], nodes: Callable[[], Iterable[NodeName]]
    ) -> None:
        """`waiting`: whether any pod waits. `nodes`: those that Kubernetes has."""
        self.done = 0
        """How often pods were woken."""
        self._api, self._clock, self._waiting, self._nodes = api, clock, waiting, nodes
        self._why = ""
        self._asked = anyio.Event()

    def ask(self, why: str) -> None:
        """Pods that were refused may fit now. `why` is a word for people who look at the node."""
        self._why = why
        self._asked.set()

    async def run(self) -> None:
        """Wakes pods when it is asked for, for ever."""
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            if self._waiting() and await self._wake():
                await self._clock.sleep(PAUSE)

    async def _wake(self) -> bool:
        """Returns whether anything was tried. What fails is asked for again."""
        node = next(iter(self._nodes()), None)
        if node is None:
            return False
        try:
            await self._api.wake(node, f"{self._why} {self._clock.wall():.3f}")
            self.done += 1
        except TopoalignError as error:
            log.warning("waiting pods were not woken", node=node, finding=error.finding)
            self._asked.set()
        return True
