"""
Writes Kubernetes Events of pods: their reservation, why a bind failed, why no node admits them, refusals by nodes, and
binds without the extender.

They supplement the scheduler's Events with counts, which the texts for the scheduler must not contain. An Event does
not change a pod and does not trigger a retry.

A separate task writes them, and nothing waits for it. The same Event of the same pod is written at most once in ten
minutes, and not while it exists: all replicas use the same name. At most 60 are written at once and then two per
second, because etcd stores them. Further Events are dropped and counted. A failed write is not retried.
"""

from asyncio import Queue
from collections import Counter
from collections.abc import Collection

import anyio
import anyio.lowlevel
import structlog

from topoalign.core.model.errors import TopoalignError, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.ports import KubernetesApi, PodEvent
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.runtime.recent_dict import RecentDict

AGAIN_SECONDS = 600.0
"""An Event exists for an hour; a repetition within ten minutes adds nothing."""
BURST = 60
BURST_SECONDS = 30.0
MOST_REMEMBERED = 10_000
MOST_WAITING = 100
MOST_CODES = 5
"""Maximum number of reasons in an Event."""

log = structlog.get_logger("topoalign.registry.scheduling")


class TokenBucket:
    """
    A bucket of `most` tokens. An empty bucket is full again after `seconds`.

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


class EventWriter:
    """Writes Events of pods: `submit` queues them, and `run` writes them."""

    def __init__(self, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        """`written`, `repeated`, `dropped`, `failed`."""
        self._clock = clock
        self._bucket = TokenBucket(clock, BURST, BURST_SECONDS)
        self._written = RecentDict[tuple[str, str, str], float](MOST_REMEMBERED)
        """`PodEvent.key` -> monotonic seconds of its last write."""
        self._waiting = Queue[PodEvent](MOST_WAITING)

    def submit(self, report: PodEvent) -> None:
        """Queues an Event, unless one of the same key was written recently."""
        now = self._clock.monotonic()
        last = self._written.get(report.key)
        if last is not None and now < last + AGAIN_SECONDS:
            self.counts["repeated"] += 1
        elif self._waiting.full() or not self._bucket.take():
            self.counts["dropped"] += 1
        else:
            self._written[report.key] = now
            self._waiting.put_nowait(report)

    async def run(self, api: KubernetesApi) -> None:
        """Writes queued Events to this API server until cancelled."""
        while True:
            report = await self._waiting.get()
            await anyio.lowlevel.checkpoint()  # the call that it is about is answered first
            try:
                await api.report(report)
            except TopoalignError as error:
                self.counts["failed"] += 1
                log.info("an event was not written", reason=report.reason, finding=error.finding)
            else:
                self.counts["written"] += 1


def refusal_event(pod: PodToSchedule, counts: Counter[str], nodes: Collection[NodeName]) -> PodEvent:
    """The Event that no node admits a pod. `counts`: refusal label -> number of nodes; `nodes`: those of Kubernetes."""
    namespace = pod.request.namespace
    name = pod.request.name
    why = "; ".join(f"{label} on {count}" for label, count in counts.most_common(MOST_CODES))
    asked = f"{counts.total()} node{'s' if counts.total() != 1 else ''} that the scheduler asked about"
    return PodEvent(
        namespace=namespace,
        name=name,
        uid=pod.uid,
        reason="NoNodeFits",
        note=(
            f"none of the {asked} (the cluster has {len(nodes)}) admits the pod: {why}; "
            f"see `topoalign why {clean(namespace)}/{clean(name)}`"
        ),
        identity=" ".join(sorted(counts)),  # counts change with every pod of the cluster
        kind="Warning",
    )
