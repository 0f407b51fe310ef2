"""
Finds pods that kube-scheduler has bound without the extender, because its `managedResources` lacks their resources.

Such a pod names our scheduler, was pending and then bound to a node of topoalign, requests a resource that the node
offers, and has no reservation of any registry, although the extender reserves before it binds. A pod is checked some
seconds after its bind, because the bus may deliver the reservation after the API server reports the Binding.
"""

from collections.abc import Callable, Collection

from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.ports import Clock
from topoalign.registry.ports import DEFAULT_SCHEDULER, PodEvent, SeenPod
from topoalign.runtime.recent_dict import RecentDict

CHECK_SECONDS = 15.0
"""
A pod is checked once to twice this time after its bind. This is long enough to notice that the node's allocator no
longer answers, for example because the bus is disconnected.
"""
MOST_REMEMBERED = 10_000
"""Maximum number of reserved pods that are remembered: many more than are bound within `CHECK_SECONDS`."""


class BypassedPods:
    """Reports pods that were bound without the extender. `run` checks them."""

    def __init__(
        self,
        clock: Clock,
        report: Callable[[PodEvent], None],
        offered: Callable[[NodeName], Collection[ResourceName]],
        behind: Callable[[], str | None],
        scheduler: str,
    ) -> None:
        """
        `report` writes an Event. `offered`: the resources that a node offers; empty if its allocator does not answer.
        `behind`: why reservations are missing; None: they are complete. `scheduler`: the configured name, or empty.
        """
        self._clock = clock
        self._report = report
        self._offered = offered
        self._behind = behind
        self._schedulers = {DEFAULT_SCHEDULER, scheduler or DEFAULT_SCHEDULER}
        self._reserved = RecentDict[str, None](MOST_REMEMBERED)
        """UIDs of pods with a present or former reservation."""
        self._bound: dict[str, tuple[SeenPod, NodeName]] = {}
        """Pods that were bound since the last check, and for which no reservation was known at that time."""

    def observe(self, event: ReservationsChanged) -> None:
        """Notes the pods that have or had a reservation on the node of this event."""
        uids = (each.pod_uid for each in event.reservations)
        for uid in (*uids, *event.consumed, *event.expired, *event.cancelled):
            self._reserved[uid] = None

    def note_bound(self, pod: SeenPod, node: NodeName) -> None:
        """Notes a pod that was pending and is now bound to this node."""
        if pod.uid not in self._reserved and pod.scheduler in self._schedulers:
            self._bound[pod.uid] = pod, node

    async def run(self) -> None:
        """Checks the bound pods until cancelled."""
        due: dict[str, tuple[SeenPod, NodeName]] = {}
        while True:
            await self._clock.sleep(CHECK_SECONDS)
            if self._behind() is None:
                for pod, node in due.values():
                    self._check(pod, node)
            due = self._bound
            self._bound = {}

    def _check(self, pod: SeenPod, node: NodeName) -> None:
        if pod.uid in self._reserved:
            return
        try:
            request = pod.to_schedule().request
        except InvalidField:
            return
        containers = (*request.init_containers, *request.containers)
        requested = {name for each in containers for name, amount in each.limits.items() if amount}
        names = sorted(requested.intersection(self._offered(node)))
        if not names:
            return
        entries = ", ".join(f"{{name: {clean(name)}}}" for name in names)
        note = (
            f"bound to {clean(node)} without asking topoalign, so nothing is reserved; "
            f"add {entries} to managedResources of the extender in the configuration of kube-scheduler"
        )
        self._report(
            PodEvent(
                namespace=pod.namespace,
                name=pod.name,
                uid=pod.uid,
                reason="BoundWithoutExtender",
                note=note,
                kind="Warning",
            )
        )
