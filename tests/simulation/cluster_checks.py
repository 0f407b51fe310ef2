"""
What must hold in a simulated cluster, whatever fails in it.

    K1   no device is given to two pods that run, nor more of a GPU than it has; no device is reserved for two pods
    K2   a node admits what a registry has bound to it, and gives it devices that are reserved for a pod with its request
    K3   a gang whose members are all there is not half-bound longer than its reservations last
    K4   a pod that preempts others does so once, on one node; namespaces hold no more than their quota
    K5   what a registry knows of reservations is never replaced by an older message
    K6   no reservation outlives its time
    K7   after the faults all views agree: the records of nodes, what both registries know of these, and of reservations
    K8   after the faults each pod that fits is bound, and each gang that fits as a whole

What a fault explains is not checked:

- a pod is refused if it is deleted or the allocator ends during its admission, or if its reservation arrives too late;
- a pod whose reservation arrives too late has an equal part of a GPU, and reservations of others may not fit beside it;
- a gang is bound later, and a pod preempts others again, after an outage;
- two registries that bind pods of one namespace at the same time may exceed its quota, and another pod may take the part of
  a quota that victims have freed;
- room that the scheduler keeps for a pod that has preempted others is used by no other pod.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from simulation.cluster_nodes import Admission, Node
from simulation.cluster_pods import CreatedPod, Pods
from simulation.cluster_registries import Registry, Service
from simulation.cluster_world import ClusterWorld
from simulation.registry_nodes import devices_of
from simulation.registry_shares import check_enough
from simulation.world import Violation

from topoalign.core import wire
from topoalign.core.admission.prediction import predict
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission as Admitted
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import GPU_COUNT
from topoalign.core.model.reservations import Reservation
from topoalign.core.ports import Stream
from topoalign.core.state.fold import NodeState
from topoalign.registry.scheduling.binding.gang_binding import GANG_SECONDS
from topoalign.testing.fake_scheduler.preemption import Preemption

SETTLED_SECONDS = 60.0
"""After an outage until one registry binds all pods again, and knows what the other one has bound."""
SLACK_SECONDS = 20.0
"""After the time of a reservation until a registry has written that it is over."""


class ClusterChecks:
    """Looks at a cluster as it is."""

    def __init__(  # one parameter for each part of the cluster
        self,
        world: ClusterWorld,
        nodes: Mapping[NodeName, Node],
        registries: list[Registry],
        pods: Pods,
        limit: int,
        service: Service,
    ) -> None:
        """`limit`: of the quota of the namespace; 0: it has none."""
        self.world = world
        self.nodes = nodes
        self.registries = registries
        self.pods = pods
        self.limit = limit
        self._service = service
        self._held = 0
        """Of the quota, at the last look."""
        self._half: dict[str, tuple[float, float]] = {}
        """Gang that is half-bound -> since when, in seconds of the loop, and how long outages had lasted by then."""
        self._preempted: dict[str, float] = {}
        """UID of a pod that waits for the end of others -> the last look before it preempted them."""
        self._preemptions_seen = 0.0
        """When preemptions were looked at last, in seconds of the loop."""
        self._reserved: dict[tuple[NodeName, str], float] = {}
        """Node and UID of a pod -> second of the loop after which its reservation has to be over."""
        self._looked_at: dict[NodeName, NodeState] = {}
        """The record of each node as it was added up last."""

    async def follow_reservations(self) -> None:
        """K1, K6: looks at every message about reservations."""
        async with self.world.bus.follow(Stream.RESERVATIONS, wire.reservation_subject()) as messages:
            async for received in messages:
                event = wire.decode_event(received.message)
                assert isinstance(event, ReservationsChanged)
                self._note_reservations(event, received.position)

    def _note_reservations(self, event: ReservationsChanged, position: int) -> None:
        world, now = self.world, self.world.loop.time()
        shown = {each.pod: devices_of(each) for each in event.reservations}
        world.note("reserved", event.node, position, event.writer, shown)
        twice = [device for device, count in Counter(d for ids in shown.values() for d in ids).items() if count > 1]
        if twice:
            world.violate("K1", f"{twice} of {event.node} are reserved twice, in message {position}: {shown}")
        node = self.nodes[event.node]
        if world.division != "whole":
            live = [each for each in node.ledger.state.allocations.values() if each.pod_uid not in node.ended]
            done = self.pods.by_uid.keys() - {pod.uid for pod, _ in self.pods.live()}
            if not node.has_late_pod:
                self._check_enough(live, event.reservations, done)
        until = {(event.node, each.pod_uid): now + each.seconds_left for each in event.reservations}
        for key in [key for key in self._reserved if key[0] == event.node and key not in until]:
            del self._reserved[key]
        for key, end in until.items():
            self._reserved[key] = end if key[1] in event.made else min(end, self._reserved.get(key, end))

    def _check_enough(
        self, live: Iterable[Allocation], reservations: Iterable[Reservation] = (), done: Collection[str] = ()
    ) -> None:
        try:
            check_enough(live, reservations, done)
        except Violation as violation:
            self.world.violate("K1", str(violation))

    def after_step(self, preemptions: list[Preemption]) -> None:
        """Raises Violation."""
        for node in self.nodes.values():
            while node.admissions:
                self._check_admission(node, node.admissions.pop())
            while node.refusals:
                uid, code = node.refusals.pop()
                name = self.pods.by_uid[uid].name
                self.world.violate("K2", f"{node.name} refuses {name}, which was bound to it: {code}")
            self._check_given(node)
        self._check_gangs()
        self._check_preemptions(preemptions)
        self._check_quota()
        self._check_times()
        if self.world.violations:
            raise self.world.violations[0]

    def _check_admission(self, node: Node, admission: Admission) -> None:
        """K2: what a pod got was reserved for it, or for another pod with its request."""
        world, pod = self.world, self.pods.by_uid[admission.uid]
        if pod.uid in node.late or world.is_disturbed_since(admission.began - SLACK_SECONDS):
            return
        if admission.own is None:
            if not world.rate:
                world.violate("K2", f"nothing was reserved for {pod.name}, which was bound to {node.name}")
            return
        got = sorted(device for each in admission.made for device in each.device_ids)
        request = limits_of(pod)
        alike = [
            sorted(devices_of(each))
            for each in admission.reserved
            if each.pod_uid in self.pods.by_uid and limits_of(self.pods.by_uid[each.pod_uid]) == request
        ]
        if got not in alike and self.world.division == "whole" and node.rules.policy == "none":
            world.violate("K2", f"{pod.name} got {got} on {node.name}, and reserved were {alike}")

    def _check_given(self, node: Node) -> None:
        """K1."""
        holders: defaultdict[tuple[ResourceName, DeviceID], list[str]] = defaultdict(list)
        for uid, devices in node.used.items():
            for resource, ids in devices.items():
                for device in ids:
                    holders[resource, device].append(uid)
        for (_, device), uids in holders.items():
            if len(uids) > 1:
                self.world.violate("K1", f"{uids} have {device} of {node.name}")
        if self.world.division != "whole" and self._looked_at.get(node.name) is not node.ledger.state:
            self._looked_at[node.name] = node.ledger.state
            live = [each for each in node.ledger.state.allocations.values() if each.pod_uid in node.used]
            self._check_enough(live)

    def gangs(self) -> Iterator[tuple[str, list[CreatedPod], list[CreatedPod]]]:
        """Each gang whose members are all there, with those that are bound, and those that wait."""
        members: defaultdict[str, list[tuple[CreatedPod, bool]]] = defaultdict(list)
        for pod, shown in self.pods.live():
            if pod.gang:
                members[pod.gang].append((pod, bool(shown["spec"].get("nodeName"))))
        for gang, found in members.items():
            if len(found) == found[0][0].size:
                yield (
                    gang,
                    [pod for pod, is_bound in found if is_bound],
                    [pod for pod, is_bound in found if not is_bound],
                )

    def _check_gangs(self) -> None:
        """K3."""
        now, half = self.world.loop.time(), dict[str, tuple[float, float]]()
        for gang, bound, waiting in self.gangs():
            if bound and waiting:
                since, _ = half[gang] = self._half.get(gang, (now, self.world.outage_seconds()))
                if now > since + GANG_SECONDS + SLACK_SECONDS and self._is_to_be_completed(half[gang]):
                    self.world.violate("K3", f"of {gang} {names(bound)} are bound, and {names(waiting)} are not")
        self._half = half

    def _is_to_be_completed(self, half: tuple[float, float]) -> bool:
        """Whether outages have left a half-bound gang the time to be bound as a whole, and no pod keeps room for itself."""
        return self.world.outage_seconds() - half[1] < GANG_SECONDS / 2 and not self._nominated()

    def _nominated(self) -> set[str]:
        """Nodes on which the scheduler keeps room for pods that have preempted others, and wait."""
        waiting = (shown for _, shown in self.pods.live() if not shown["spec"].get("nodeName"))
        return {shown["status"]["nominatedNodeName"] for shown in waiting if "nominatedNodeName" in shown["status"]}

    def _check_preemptions(self, preemptions: list[Preemption]) -> None:
        """K4. `preemptions`: those since the last look."""
        since_last, self._preemptions_seen = self._preemptions_seen, self.world.loop.time()
        waiting = {pod.uid for pod, shown in self.pods.live() if not shown["spec"].get("nodeName")}
        self._preempted = {uid: since for uid, since in self._preempted.items() if uid in waiting}
        for each in preemptions:
            pod = self.pods.created[each.pod[1]]
            self.world.note("preempted", pod.name, each.node, [name for _, name in each.victims])
            since = self._preempted.get(pod.uid)
            is_disturbed = since is not None and self.world.is_disturbed_since(max(since - SLACK_SECONDS, 0.0))
            is_explained = self.limit or self.world.rate or is_disturbed
            if since is not None and not is_explained:
                self.world.violate("K4", f"{pod.name} preempts {each.victims} on {each.node}, and others before")
            self._preempted.setdefault(pod.uid, since_last)

    def held_of_quota(self) -> int:
        """What the bound pods of the namespace hold of what its quota counts."""
        return sum(pod.counted for pod, shown in self.pods.live() if shown["spec"].get("nodeName"))

    def _check_quota(self) -> None:
        """K4."""
        before, self._held = self._held, self.held_of_quota() if self.limit else 0
        binds_alone = self._service.has_affinity and not self.world.is_disturbed_since(
            self.world.loop.time() - SETTLED_SECONDS
        )
        if binds_alone and self._held > max(before, self.limit):
            self.world.violate(
                "K4", f"the pods of the namespace hold {self._held} of {self.limit}, and before {before}"
            )

    def _check_times(self) -> None:
        """K6."""
        now = self.world.loop.time()
        for (node, uid), until in self._reserved.items():
            if now > until + SLACK_SECONDS and not self.world.is_disturbed_since(until):
                self.world.violate("K6", f"what is reserved on {node} for {uid} is over since {until:g}")

    def difference(self) -> tuple[str, str] | None:
        """K7, K8: the invariant that does not hold yet, and what differs; None: all do."""
        for node in self.nodes.values():
            if found := self._difference_of(node):
                return "K7", found
        for pod, shown in self.pods.live():
            if not shown["spec"].get("nodeName") and not pod.gang and (node_name := self._fits(pod)):
                return "K8", f"{pod.name} waits, and fits on {node_name}"
        for gang, bound, waiting in self.gangs():
            if waiting and self._fit_together(waiting):
                return "K8", f"{names(waiting)} of {gang} wait, and fit"
            if waiting and bound and self._is_to_be_completed(self._half[gang]):
                return "K3", f"of {gang} {names(bound)} are bound, and {names(waiting)} are not"
        return None

    def _difference_of(self, node: Node) -> str:
        held = {each.pod_uid: each.device_ids for each in node.ledger.state.allocations.values()}
        if node.ended or {*held} != {*node.used}:
            return f"{node.name} has recorded {sorted(held)}, and its kubelet runs {sorted(node.used)}"
        newest = self.world.bus._logs[Stream.RESERVATIONS].newest.get(wire.reservation_subject(node.name))
        position = newest.position if newest is not None else 0
        for each in self.registries:
            if not each.is_ready or each.replica.scheduling.behind():
                return f"{each.name} is not ready: {each.replica.scheduling.behind()}"
            state = each.replica.members.member(node.name).state
            if (state.epoch, state.seq, state.digest) != (
                node.ledger.state.epoch,
                node.ledger.state.seq,
                node.ledger.state.digest,
            ):
                return f"{each.name} knows {node.name} up to {state.seq}, and that is at {node.ledger.state.seq}"
            if each.replica.scheduling.reservations.of(node.name).position != position:
                return f"{each.name} has another message about the reservations of {node.name} than the newest"
        bound = {pod.uid for pod, shown in self.pods.live() if shown["spec"].get("nodeName") == node.name}
        if reserved := [each.pod for each in node.reserved() if each.pod_uid not in bound and not each.gang]:
            return f"on {node.name} devices are reserved for {reserved}, which are not bound there"
        return ""

    def _is_within_quota(self, pods: list[CreatedPod]) -> bool:
        return not self.limit or self.held_of_quota() + sum(each.counted for each in pods) <= self.limit

    def _fits(self, pod: CreatedPod) -> str:
        """A node that would admit the pod beside what is reserved there for others; empty: none."""
        if not self._is_within_quota([pod]):
            return ""
        now, kept = self.world.clock.wall(), self._nominated()
        for node in (each for each in self.nodes.values() if each.name not in kept):
            others = tuple(each for each in node.reserved() if each.pod_uid != pod.uid)
            if isinstance(predict(node.kubelet_state(), pod.request, now, reserved=others), Admitted):
                return node.name
        return ""

    def _fit_together(self, waiting: list[CreatedPod]) -> bool:
        """Whether all of these would be admitted, placed one after the other on the first node that takes them."""
        if not self._is_within_quota(waiting):
            return False
        now = self.world.clock.wall()
        uids = {each.uid for each in waiting}
        kept = self._nominated()
        states = {name: node.kubelet_state() for name, node in self.nodes.items() if name not in kept}
        for pod in waiting:
            for name in states:
                others = tuple(each for each in self.nodes[name].reserved() if each.pod_uid not in uids)
                decision = predict(states[name], pod.request, now, reserved=others)
                if isinstance(decision, Admitted):
                    for each in decision.allocations:
                        states[name] = states[name].holding(each)
                    break
            else:
                return False
        return True


def limits_of(pod: CreatedPod) -> tuple[object, object]:
    """Equal for pods that a kubelet cannot tell apart."""
    return dict(pod.request.containers[0].limits), pod.request.annotations.get(GPU_COUNT)


def names(pods: list[CreatedPod]) -> list[str]:
    return [each.name for each in pods]
