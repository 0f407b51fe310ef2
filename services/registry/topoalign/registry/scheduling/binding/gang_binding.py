"""
Plans a gang at the first filter of one of its pods, and reserves devices for the whole gang at the first bind.

All pending pods of the gang are planned together (`core.admission.gang_plan`), and the filter passes only the planned
node for each pod. kube-scheduler v1.36 filters all pods of a PodGroup before it binds the first one. With the plan, they
still fit together. At the first bind, the gang is planned again, on the same nodes if they still admit it. Either all of
its pods are reserved in one atomic batch, or none is. If a pod is not bound in time, its reservation expires like any
other. So an incomplete gang holds only the devices of its bound pods.

The members are the pods that the API server reports as neither ended nor being deleted. A pending member counts as
absent if it cannot be scheduled yet, or if its `schedulerName` differs from that of the pod to be bound. While members
are absent, nothing is planned, and the gang waits.

A pod that has succeeded counts as present as long as a member has the same controller. So the replacement of a failed
pod does not wait for finished pods. If the next Job has the same gang name, it waits until all of its own pods exist.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

import anyio
import msgspec
import structlog

from topoalign.core.admission.admit import drive_async
from topoalign.core.admission.gang_plan import (
    GangMember,
    GangPlacement,
    fabric_of,
    group_nodes_by_fabric,
    plan_gang,
    pod_class_key,
)
from topoalign.core.demand.gangs import Gang, gang_of
from topoalign.core.model.errors import BusConflict, InvalidField, NoFit, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.kubelet.files.manifest import pod_groups_of
from topoalign.registry.ports import SeenPod, SeenPodGroup
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations, ReservationChange
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.filter.scheduler import BestNodes
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.runtime.recent_dict import RecentDict
from topoalign.runtime.request_turns import TaskTurns

GANG_SECONDS = 120.0
"""Maximum time to bind all pods of a gang. kube-scheduler binds tens of pods per second and retries after seconds."""
AHEAD_SECONDS = 30.0
"""Maximum time from the plan at the first filter to the first bind. kube-scheduler filters hundreds of pods per second."""
UNFIT_SECONDS = 5.0
"""How long a plan that was not found is not searched again for the same input. Refused pods come back together."""
GANGS_KEPT = 256
"""Maximum number of gangs for which a plan without reservations is kept."""
MOST_TRIES = 3
"""Maximum number of plans in one bind if other registries reserve on the nodes in the meantime."""
MOST_ABSENT = 3
"""Maximum number of absent pods in an error message."""

log = structlog.get_logger("topoalign.registry.scheduling")


class GangWaits(NoFit):
    """Raised for a pod whose gang cannot be bound as a whole now."""

    def __init__(self, gang: str, finding: str, remedy: str) -> None:
        super().__init__(f"gang {clean(gang, 300)}: {finding}", remedy)


class SeenMember(NamedTuple):
    """A pod of a gang as the API server reports it."""

    pod: PodToSchedule
    gang: Gang
    """From the pod's annotations. The size can differ from that of other members."""
    node: NodeName | None
    controller: str
    """UID of its controller; empty: it has none."""
    has_succeeded: bool
    """Whether the pod has succeeded. Then it is no longer a member, but it can count as present."""
    scheduler: str
    waits_for: str
    """As in `SeenPod`."""

    def absence(self, scheduler: str) -> str:
        """Why it counts as absent for a pod of this scheduler; empty: it is present. Bound pods are always present."""
        if self.node is not None:
            return ""
        other = "" if self.scheduler == scheduler else f"names the scheduler {clean(self.scheduler)}"
        return self.waits_for or other


class PlanAhead(NamedTuple):
    """A plan without reservations."""

    expires: float
    """Monotonic seconds."""
    nodes: Mapping[str, NodeName]
    """UID of a pod -> its node."""


class Gangs:
    """The gangs of all pods that the API server reports."""

    def __init__(
        self,
        reservations: ClusterReservations,
        clock: Clock,
        hardware: Callable[[NodeName], Topology],
        candidate: Callable[[NodeName], GangPlacement | None],
    ) -> None:
        """
        `hardware` returns a node's hardware. `candidate` returns a node with its allocations; None: no longer offered.
        """
        self._reservations = reservations
        self._hardware = hardware
        self._candidate = candidate
        self._clock = clock
        self._turns = TaskTurns(clock)
        self._ahead = RecentDict[str, PlanAhead](GANGS_KEPT)
        """Gang -> its plan, until its devices are reserved."""
        self._unfit = RecentDict[str, tuple[float, object]](GANGS_KEPT)
        """Gang -> until when an attempt without a plan is not repeated, and its input."""
        self._members: dict[str, dict[str, SeenMember]] = {}
        """Gang -> UID of each of its pods -> the pod."""
        self._gangs: dict[str, str] = {}
        """UID of a pod -> its gang."""
        self._pod_groups: dict[tuple[str, str], SeenPodGroup] = {}
        """API group and `namespace/name` -> the PodGroup."""
        self.listed_pod_groups = set[str]()
        """API groups whose PodGroups are known."""
        self._planning = WeakValueDictionary[str, anyio.Lock]()
        """Gang -> its lock, while it is planned."""

    def see(self, pod: SeenPod) -> None:
        """Records a pod that the API server reports."""
        names_a_gang = GANG in pod.annotations or pod_groups_of(pod.content)
        if not names_a_gang and pod.uid not in self._gangs:  # true for most pods
            return
        member = member_of(pod)
        if member is None or self._gangs.get(pod.uid) != member.gang.name:
            self.lose(pod.uid)
        if member is not None:
            self._gangs[pod.uid] = member.gang.name
            self._members.setdefault(member.gang.name, {})[pod.uid] = member

    def lose(self, uid: str) -> None:
        """Removes a pod."""
        gang = self._gangs.pop(uid, None)
        if gang is not None:
            del self._members[gang][uid]
            if not self._members[gang]:
                del self._members[gang]

    def see_pod_group(self, api_group: str, group: SeenPodGroup) -> bool:
        """Records a PodGroup of this API group. Returns whether its minimum is new."""
        before = self._pod_groups.get((api_group, group.key))
        self._pod_groups[api_group, group.key] = group
        return before is None or before.minimum != group.minimum

    def lose_pod_group(self, api_group: str, key: str) -> None:
        """Removes a PodGroup."""
        self._pod_groups.pop((api_group, key), None)

    def node_ahead(self, uid: str) -> NodeName | None:
        """The node of a pod by a plan without reservations; None: there is no such plan."""
        return self._nodes_ahead(self._gangs.get(uid, "")).get(uid)

    def _nodes_ahead(self, gang: str) -> Mapping[str, NodeName]:
        plan = self._ahead.get(gang)
        return {} if plan is None or plan.expires <= self._clock.monotonic() else plan.nodes

    def drop(self, uid: str) -> bool:
        """Removes the pod from the plan without reservations. Returns whether it was in it."""
        gang = self._gangs.get(uid, "")
        nodes = self._nodes_ahead(gang)
        if uid not in nodes:
            return False
        self._ahead[gang] = self._ahead[gang]._replace(nodes={each: nodes[each] for each in nodes if each != uid})
        return True

    def node_of(self, uid: str) -> NodeName | None:
        """The node of a pod of a gang by its reservation; None: it has none."""
        if uid not in self._gangs:
            return None
        return next((node for node, each in self._reservations.of_pod(uid).items() if each.gang), None)

    def waiting_with(self, uid: str) -> list[str]:
        """UIDs of the pods of this pod's gang that have no node; empty: the pod has no gang."""
        members = self._members.get(self._gangs.get(uid, ""), {})
        if uid not in members or self._is_basic(members[uid].gang):
            return []
        return [each for each, member in members.items() if member.node is None and not member.has_succeeded]

    async def plan_ahead(self, best: BestNodes, pod: PodToSchedule, version: int) -> None:
        """
        Plans the gang of a pod without reserving devices, unless the pod has a planned node. `version`: changes with
        the cluster. Raises InvalidField, and GangWaits if the gang does not fit. A gang that waits for something else is
        not planned.
        """
        gang = gang_of(pod.request)
        if gang is None or self.node_of(pod.uid) is not None or self.node_ahead(pod.uid) is not None:
            return
        async with self._planning.setdefault(gang.name, anyio.Lock()):
            try:
                waiting, least = self._pods_to_plan(gang, self._minimum(gang), pod)
            except GangWaits:  # the bind reports it
                return
            if self.node_ahead(pod.uid) is not None or all(each.uid != pod.uid for each in waiting):
                return
            changes = await self._plan(gang.name, waiting, best, pod, None, least, version)
            if changes is None:
                raise does_not_fit(gang.name)
            nodes = {each.pod_uid: change.node for change in changes for each in change.made}
            self._ahead[gang.name] = PlanAhead(self._clock.monotonic() + AHEAD_SECONDS, nodes)

    async def plan(self, best: BestNodes, pod: PodToSchedule, node: NodeName) -> str:
        """Reserves the whole gang of the pod. Returns the gang's name, or "". Raises InvalidField and GangWaits."""
        gang = gang_of(pod.request)
        minimum = None if gang is None else self._minimum(gang)
        if gang is None or minimum is None:
            return ""
        async with self._planning.setdefault(gang.name, anyio.Lock()):
            if self.node_of(pod.uid) is None:
                await self._reserve(gang, minimum, best, pod, node)
        planned = self.node_of(pod.uid)
        if planned is not None and planned != node:
            raise GangWaits(gang.name, "the pod is planned to another node", "the scheduler tries again, on that node")
        return gang.name

    def _is_basic(self, gang: Gang) -> bool:
        """Whether the pods of the gang are scheduled one by one."""
        groups = [self._pod_groups.get((api_group, gang.name)) for api_group in gang.api_groups]
        return gang.size is None and all(group is not None and group.minimum is None for group in groups)

    def _minimum(self, gang: Gang) -> int | None:
        """
        The minimum number of pods that start together. None: they are scheduled one by one. Raises GangWaits if a
        PodGroup is missing, and if the sizes of two sources differ.
        """
        sizes: dict[str, int | None] = {} if gang.size is None else {GANG_SIZE: gang.size}
        for api_group in gang.api_groups:
            group = self._pod_groups.get((api_group, gang.name))
            if group is None and api_group not in self.listed_pod_groups:
                remedy = f"check that the registry may list podgroups of {api_group}"
                raise GangWaits(gang.name, f"the PodGroups of {api_group} are not listed yet", remedy)
            if group is None:
                remedy = "create it, or correct its name in the pods"
                raise GangWaits(gang.name, f"the API server reports no PodGroup of {api_group}", remedy)
            sizes[f"the PodGroup of {api_group}"] = group.minimum
        (first, minimum), *others = sizes.items()
        for source, size in others:
            if size != minimum:
                finding = f"{first} is for {minimum or 'no'} pods, and {source} for {size or 'no'} pods"
                raise GangWaits(gang.name, finding, "give both the same number, or keep one of them")
        return minimum

    async def _reserve(self, gang: Gang, minimum: int, best: BestNodes, pod: PodToSchedule, node: NodeName) -> None:
        """Plans all pods of the gang that have neither a node nor a reservation, and reserves their devices."""
        for _ in range(MOST_TRIES):
            waiting, least = self._pods_to_plan(gang, minimum, pod)
            if all(each.uid != pod.uid for each in waiting):  # planned by another registry, or it needs nothing
                return
            changes = await self._plan(gang.name, waiting, best, pod, node, least)
            if changes is None:
                break
            try:
                await self._reservations.write(changes)
            except BusConflict:
                continue
            self._ahead.pop(gang.name, None)
            made = {each.pod_uid: change.node for change in changes for each in change.made}
            log.info("reserved for a gang", gang=clean(gang.name), pods=len(made), nodes=len(changes))
            # During the write, pods may have been deleted or bound to another node.
            known = self._members.get(gang.name, {})
            for uid, planned in made.items():
                if uid not in known or known[uid].node not in (None, planned):
                    await self._reservations.cancel(uid, {planned})
            return
        raise does_not_fit(gang.name)

    def _pods_to_plan(self, gang: Gang, minimum: int | None, pod: PodToSchedule) -> tuple[list[PodToSchedule], int]:
        """
        The pods of the gang that have neither a node nor a reservation, and the number of them that must be planned.
        Empty if they are scheduled one by one (`minimum` None). Raises the errors of `_present_members`.
        """
        if minimum is None:
            return [], 0
        members = self._present_members(gang, minimum, pod.uid)
        planned = self._reservations.of_gang(gang.name)
        waiting = [
            each.pod
            for uid, each in members.items()
            if each.node is None and uid not in planned and holds_something(each.pod.request)
        ]
        others = len(members) - len(waiting)  # bound, planned by another registry, or in need of no devices
        return waiting, len(waiting) if gang.size is not None else max(1, minimum - others)

    def _present_members(self, gang: Gang, minimum: int, uid: str) -> dict[str, SeenMember]:
        """
        Returns the present members by UID. Raises GangWaits if this pod or too many others are absent, or if pending
        members differ in the size or in the PodGroups that they name.
        """
        known = self._members.get(gang.name, {})
        members = {each: member for each, member in known.items() if not member.has_succeeded}
        if uid not in members:
            raise GangWaits(gang.name, "the API server does not report the pod", "the scheduler tries again")
        if {each.gang for each in members.values() if each.node is None} != {gang}:
            raise GangWaits(gang.name, "its pods differ in the gang's size or PodGroup", "give all of them the same")
        controllers = {each.controller for each in members.values()} - {""}
        done = sum(each.has_succeeded and each.controller in controllers for each in known.values())
        absences = {each: member.absence(members[uid].scheduler) for each, member in members.items()}
        present = {each: member for each, member in members.items() if not absences[each]}
        if len(present) + done < minimum or uid not in present:
            requests = {each: member.pod.request for each, member in members.items() if absences[each]}
            reasons = sorted(
                f"; {clean(f'{request.namespace}/{request.name}')} {absences[each]}"
                for each, request in requests.items()
            )
            raise GangWaits(
                gang.name,
                f"not all of its pods are there yet: {len(present) + done} of {minimum}{''.join(reasons[:MOST_ABSENT])}",
                "create them and let them be scheduled, or correct the gang's size",
            )
        return present

    async def _plan(
        self,
        gang: str,
        waiting: Sequence[PodToSchedule],
        best: BestNodes,
        pod: PodToSchedule,
        node: NodeName | None,
        least: int,
        version: int | None = None,
    ) -> list[ReservationChange] | None:
        """
        Plans a gang: on the nodes of the plan without reservations if possible, otherwise with this pod on this node
        (`node` None: on any node), otherwise anywhere. If not all pods fit, it plans this pod with as many others as fit,
        but at least `least` pods. `version`: of the cluster; a plan that failed shortly before with the same input is not
        tried again. Returns the changes to write; None: the gang does not fit.
        """
        positions: dict[NodeName, int] = {}

        def candidate(name: NodeName) -> GangPlacement | None:
            positions[name] = self._reservations.of(name).position
            return self._candidate(name)

        async def give(_: None) -> None:
            await self._turns.give()

        own = await best(pod, node)
        fitting: dict[object, Sequence[NodeName]] = {}
        for each in waiting:
            if pod_class(each) not in fitting:
                fitting[pod_class(each)] = ()
                with suppress(InvalidField, NoFit):  # an invalid member must not hide the state of this pod
                    fitting[pod_class(each)] = await best(each, None)
        kinds = {kind: frozenset(names) for kind, names in fitting.items()}
        members = [
            GangMember(each.uid, each.request, frozenset(own) if each.uid == pod.uid else kinds[pod_class(each)])
            for each in waiting
        ]
        tried = version, least, pod.uid if least < len(members) else "", frozenset(each.uid for each in waiting), kinds
        until, failed = self._unfit.get(gang, (0.0, None))
        if version is not None and failed == tried and self._clock.monotonic() < until:
            return None
        nodes = dict.fromkeys((*own, *(name for names in fitting.values() for name in names)))
        fabrics = {name: fabric_of(self._hardware(name)) for name in nodes}
        groups = tuple(group_nodes_by_fabric(fabrics, node or next(iter(nodes), None)))
        ahead = {uid: its for uid, its in self._nodes_ahead(gang).items() if uid != pod.uid}
        for wanted, group, fixed, needed in plan_attempts(members, groups, ahead, (pod.uid, node), least):
            plan = await drive_async(plan_gang(gang, wanted, group, candidate, GANG_SECONDS, fixed, needed), give)
            if plan is not None:
                return [
                    ReservationChange(node=name, position=positions[name], made=made) for name, made in plan.items()
                ]
        self._unfit[gang] = self._clock.monotonic() + UNFIT_SECONDS, tried
        return None


def plan_attempts(
    members: Sequence[GangMember],
    groups: Sequence[Sequence[NodeName]],
    ahead: Mapping[str, NodeName],
    fixed: tuple[str, NodeName | None],
    least: int,
) -> Iterator[tuple[Sequence[GangMember], Sequence[NodeName], tuple[str, NodeName | None] | None, int]]:
    """
    The attempts to plan a gang, in their order: members, nodes, `fixed` and `least` of `plan_gang`. `groups`: of nodes,
    the last one with all nodes; `ahead`: UID of a pod -> its node in an earlier plan.
    """
    as_ahead = [each._replace(nodes=frozenset({ahead[each.uid]})) if each.uid in ahead else each for each in members]
    nodes = (*dict.fromkeys((*groups[-1], *ahead.values())),)
    for needed in dict.fromkeys((len(members), least)):
        if ahead:
            yield as_ahead, nodes, fixed, needed
        yield from ((members, group, fixed, needed) for group in groups if fixed[1] is None or fixed[1] in group)
        if needed == len(members):
            yield from ((members, group, None, needed) for group in groups)


def does_not_fit(gang: str) -> GangWaits:
    """The error for a gang without a plan."""
    return GangWaits(gang, "it does not fit as a whole", "wait until devices are free, or ask for less")


def pod_class(pod: PodToSchedule) -> tuple[bytes, bytes]:
    """A key that is equal for pods with the same request and constraints."""
    return pod_class_key(pod.request), msgspec.json.encode(pod.constraints, order="deterministic")


def member_of(pod: SeenPod) -> SeenMember | None:
    """The pod as a member of its gang; None: the pod has no gang, is invalid, has failed, or is being deleted."""
    try:
        asked = pod.to_schedule()
        gang = gang_of(asked.request)
    except InvalidField:
        return None
    if gang is None or pod.deleting or (pod.finished and not pod.has_succeeded):
        return None
    return SeenMember(asked, gang, pod.node, pod.controller, pod.has_succeeded, pod.scheduler, pod.waits_for)
