"""
Finds pods that kube-scheduler has bound without the extender, because its `managedResources` lacks their resources.

These are pods that the watch reported without a node and then on a node of topoalign, that request a resource which the node
offers and name our scheduler, and for which no registry has a reservation. The extender reserves before it binds, and all
registries see all reservations. A pod is checked some seconds after its bind, because the bus may deliver the reservation
after the API server reports the Binding.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

import structlog

from topoalign.core.model.errors import InvalidField, clean, quoted
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.ports import Clock
from topoalign.registry.ports import PodEvent, SeenPod
from topoalign.registry.scheduling.binding.binding import DEFAULT_SCHEDULER

CHECK_SECONDS = 15.0
"""A pod is checked after this time, at most twice as long. Before that, a node without an answer is known, because the bus
may be disconnected then."""
NOTED_SECONDS = 3600.0
"""How long a resource is noted after the last such pod."""
MOST_REMEMBERED = 10_000
"""Reserved pods that are kept: many more than are bound within `CHECK_SECONDS`."""

log = structlog.get_logger("topoalign.registry.scheduling")


class BypassedPods:
    """Finds pods that were bound without the extender and reports them; `run` it."""

    def __init__(
        self,
        clock: Clock,
        report: Callable[[PodEvent], None],
        offered: Callable[[NodeName], Collection[ResourceName]],
        behind: Callable[[], str | None],
        scheduler: str,
    ) -> None:
        """
        `report` writes an Event. `offered`: what a node offers; empty if its allocator does not answer. `behind`: why
        reservations are missing. `scheduler`: as for `check_scheduler_and_node`.
        """
        self._clock = clock
        self._report = report
        self._offered = offered
        self._behind = behind
        self._schedulers = {DEFAULT_SCHEDULER, scheduler or DEFAULT_SCHEDULER}
        self._reserved = OrderedDict[str, None]()
        """UIDs of pods with a present or former reservation, the oldest first."""
        self._bound: dict[str, tuple[SeenPod, NodeName]] = {}
        """Pods that were bound since the last check, without a reservation that was known then."""
        self._noted: dict[ResourceName, float] = {}
        """Resource that `managedResources` lacks -> when a pod was last bound so, in monotonic seconds."""

    def observe(self, event: ReservationsChanged) -> None:
        """Takes changed reservations of a node: the pods of the event are or were reserved."""
        uids = (each.pod_uid for each in event.reservations)
        for uid in (*uids, *event.consumed, *event.expired, *event.cancelled):
            self._reserved[uid] = None
            self._reserved.move_to_end(uid)
        while len(self._reserved) > MOST_REMEMBERED:
            self._reserved.popitem(last=False)

    def note_bound(self, pod: SeenPod, node: NodeName) -> None:
        """Takes a pod that was reported without a node and is now on this one."""
        if pod.uid not in self._reserved and (pod.scheduler or DEFAULT_SCHEDULER) in self._schedulers:
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

    def finding(self) -> str | None:
        """Names the resources that `managedResources` lacks; None: none is known."""
        since = self._clock.monotonic() - NOTED_SECONDS
        names = sorted(name for name, at in self._noted.items() if at > since)
        if not names:
            return None
        return f"pods were bound without asking the extender; add to managedResources of the scheduler: {quoted(names)}"

    def _check(self, pod: SeenPod, node: NodeName) -> None:
        if pod.uid in self._reserved:
            return
        names = sorted(requested_resources(pod).intersection(self._offered(node)))
        if not names:
            return
        for name in names:
            if name not in self._noted:
                log.warning(
                    "pods are bound without asking the extender: add the resource to managedResources of the scheduler",
                    resource=clean(name),
                    pod=clean(f"{pod.namespace}/{pod.name}"),
                    node=clean(node),
                )
            self._noted[name] = self._clock.monotonic()
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


def requested_resources(pod: SeenPod) -> set[ResourceName]:
    """Returns the resources that a container of the pod requests; empty for an invalid pod."""
    try:
        request = pod.to_schedule().request
    except InvalidField:
        return set()
    containers = (*request.init_containers, *request.containers)
    return {name for each in containers for name, amount in each.limits.items() if amount}
