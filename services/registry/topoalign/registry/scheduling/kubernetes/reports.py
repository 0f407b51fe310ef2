"""
Events of Kubernetes about pods: written in a task of their own, seldom, and never waited for.

The same report about the same pod is written once in ten minutes, and not while an Event of it exists: all replicas give it
one name. At most 60 are written at once and then two a second, as
events are kept in the cluster's own store; what exceeds that is dropped and counted. An event that fails is not repeated.
"""

from asyncio import Queue
from collections import Counter, OrderedDict

import anyio.lowlevel
import structlog

from topoalign.core.model.errors import TopoalignError
from topoalign.core.ports import Clock
from topoalign.registry.ports import KubernetesApi, Report
from topoalign.registry.scheduling.kubernetes.requeue import Pace

AGAIN_SECONDS = 600.0
"""An event lives for an hour; a repetition within ten minutes says nothing new."""
BURST = 60
BURST_SECONDS = 30.0
MOST_REMEMBERED = 10_000
MOST_WAITING = 100

log = structlog.get_logger("topoalign.registry.scheduling")


class Reports:
    """What is to be told about pods; `run` tells it."""

    def __init__(self, api: KubernetesApi, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        """`written`, `repeated`, `dropped`, `failed`."""
        self._api = api
        self._clock = clock
        self._pace = Pace(clock, BURST, BURST_SECONDS)
        self._told: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """`Report.key` -> when it was last written, in monotonic seconds; the longest ago first."""
        self._waiting = Queue[Report](MOST_WAITING)

    def tell(self, report: Report) -> None:
        """Has the report written, unless one of the same key was lately."""
        key = report.key
        now = self._clock.monotonic()
        last = self._told.get(key)
        if last is not None and now < last + AGAIN_SECONDS:
            self.counts["repeated"] += 1
            return
        if self._waiting.full() or not self._pace.take():
            self.counts["dropped"] += 1
            return
        self._told[key] = now
        self._told.move_to_end(key)
        if len(self._told) > MOST_REMEMBERED:
            self._told.popitem(last=False)
        self._waiting.put_nowait(report)

    async def run(self) -> None:
        """Writes what is told, for ever."""
        while True:
            report = await self._waiting.get()
            await anyio.lowlevel.checkpoint()  # what it tells of is answered first
            try:
                await self._api.report(report)
            except TopoalignError as error:
                self.counts["failed"] += 1
                log.info("an event was not written", reason=report.reason, finding=error.finding)
            else:
                self.counts["written"] += 1
