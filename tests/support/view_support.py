"""
A cluster of nodes and its scheduling view: nodes whose facts are made by chance, in the order in which services say them,
and small ones by hand.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from random import Random

import msgspec
from decision_support import container, machine, pod
from fact_support import HEALTHY, Writer, discovered, health_of, judged, owner
from feasibility_support import demand_of, some_machine, some_pod, some_rules

from topoalign.client import Delivery
from topoalign.client.verifying import Unsettled
from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.admission.prediction import prediction_basis, to_kubelet_rules
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import Allocation, DeviceHealth, Event, HealthState, LedgerFact, UsageObserved
from topoalign.core.model.ids import CPU, GPU, MEMORY, AllocationID, DeviceID, NodeName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved
from topoalign.core.model.requests import AdmissionRules, Mode, PodLevelResources, PodRequest, Policy
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology
from topoalign.core.model.topology.shapes import Shapes
from topoalign.core.state.fold import NodeState
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.testing.manual_clock import ManualClock

SETTLED = Unsettled(frozenset(), frozenset())
NODE = NodeName("node-1")
RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="none", memory_manager="None")
PLENTY = {CPU: 1_000_000, MEMORY: 1 << 50}
"""More than the containers of any such pod request together."""
HOSTILE = "\x1b[31mred\x1b[0m<script>{{x}}\n"
TIME = 1_767_323_045.0


class Says(Writer):
    """A node that says what its services would say."""

    def __init__(
        self, name: str, hardware: Topology, rules: AdmissionRules, shapes: Shapes | None = None, epoch: int = 5
    ) -> None:
        super().__init__(name, epoch)
        self.rules = rules
        self.hardware = (shapes or Shapes()).interned(hardware)
        self.revision = 0
        self.ill: frozenset[str] = frozenset()
        self.entries: tuple[CheckpointEntry, ...] = ()

    def read(self, reading: Event) -> Event:
        self.state = self.state.apply(reading)
        return reading

    def topology(self) -> Event:
        self.revision += 1
        return self.read(discovered(self.hardware, self.node, self.revision, "boot"))

    def health(self) -> Event:
        self.revision += 1
        return self.read(judged(health_of(self.hardware, self.ill), self.node, self.revision))

    def usage(self, **kubelet: object) -> Event:
        self.revision += 1
        memory = NodeState(node=self.node)
        for entry in self.entries:
            memory = memory.holding(Allocation(id=AllocationID(entry.pod_uid + entry.container), memory=entry.memory))
        observed = KubeletObserved(
            rules=to_kubelet_rules(self.rules), entries=self.entries, memory=dict(memory.memory), registered=()
        )
        observed = msgspec.structs.replace(observed, **kubelet)
        usage = UsageObserved(
            node=self.node, epoch=1, revision=self.revision, containers=(), containers_known=True, kubelet=observed
        )
        return self.read(usage)

    def all(self) -> Iterator[Event]:
        yield from (self.topology(), self.health(), self.snapshot(), self.usage())

    def admit(self, pod: PodRequest, uid: str, *, bound: bool = True) -> Iterator[Event]:
        """What is said while a kubelet admits a pod: a fact for each resource, then what its checkpoints list."""
        basis = prediction_basis(self.state, TIME)
        demand = read_pod(pod, basis.rules)
        decision = decide_demand(as_others(basis.state, demand), demand)
        if not isinstance(decision, Admission):
            return
        for given in decision.allocations:
            assert given.owner is not None
            for resource, ids in given.devices.items():
                if ids and resource in self.hardware.offers_of:
                    name = AllocationID(f"{self.state.seq}")
                    yield self.grant(Allocation(id=name, devices={resource: ids}))
                    if bound:
                        yield self.bind(name, given.owner, uid)
            entry = CheckpointEntry(
                pod_uid=uid,
                container=given.owner.container,
                cpus=given.cpus,
                memory=given.memory,
                devices=given.devices,
                mounted=True,
            )
            self.entries = (*self.entries, entry)
        yield self.usage()

    def end(self, uid: str) -> Iterator[Event]:
        """What is said when a pod has ended and the kubelet has dropped it."""
        for held in list(self.state.allocations.values()):
            if held.pod_uid == uid:
                yield self.release(held.id)
        self.entries = tuple(each for each in self.entries if each.pod_uid != uid)
        yield self.usage()


def tell_all(cluster: Cluster, events: Iterable[Event]) -> None:
    """The cluster hears these facts, and that the allocators answer."""
    for event in events:
        cluster.apply(heard_of(event, state_of(cluster, event.node), TIME))
        cluster.answers(event.node, True)


def scheduler_of(cluster: Cluster, planned: Mapping[str, NodeName] = {}) -> Scheduler:
    """A scheduler that looks at this cluster from now on, and from nothing. `planned`: UID of a pod -> its node."""
    return Scheduler(ClusterView(cluster, lambda: SETTLED, ManualClock()), planned=planned.get)


def asked(pod: PodRequest, uid: str = "") -> PodToSchedule:
    return PodToSchedule(uid=uid or f"uid-{pod.name}", request=pod)


def some_request(chance: Random, hardware: Topology, name: str) -> PodRequest:
    """A pod that can be meant under any rules; some have pod-level resources."""
    while True:
        pod = some_pod(chance, hardware, name)
        if chance.random() < 0.15:
            pod = msgspec.structs.replace(pod, resources=PodLevelResources(requests=PLENTY, limits=PLENTY))
        if demand_of(pod, AdmissionRules()) is not None:
            return pod


def some_says(chance: Random, name: str, shapes: Shapes) -> Says:
    """A node of a machine and rules by chance, under which a kubelet would start."""
    while True:
        hardware = some_machine(chance)
        rules = some_rules(chance, hardware)
        if demand_of(some_pod(chance, hardware), rules) is not None:
            return Says(name, hardware, rules, shapes)


class OneNode:
    """One node, and a scheduler that hears what it says."""

    def __init__(self, rules: AdmissionRules = RULES, hardware: Topology | None = None) -> None:
        self.cluster, self.unsettled = Cluster(usage=True), SETTLED
        self.offered = list[NodeName]()
        """Nodes that are offered and were not, or have more free than before."""
        self.planned: dict[str, NodeName] = {}
        """UID of a pod -> the only node for it."""
        self.unmanaged = set[NodeName]()
        """Nodes to which all pods may go."""
        self.requests: dict[str, PodRequest] = {}
        """Name of a reserved pod -> its request."""
        self.refused: list[tuple[str, Counter[str]]] = []
        """UID of each pod that all nodes refused, and how many did for each reason."""
        self.view = ClusterView(self.cluster, lambda: self.unsettled, ManualClock(), offered=self.offered.append)
        self.scheduler = Scheduler(
            self.view,
            planned=self.planned.get,
            passes=lambda pod, node: node in self.unmanaged,
            requested=self.request_of,
            refused=lambda pod, counts: self.refused.append((pod.uid, counts)),
        )
        self.says = Says(NODE, hardware or machine(), rules)

    def request_of(self, reserved: Reservation) -> PodRequest | None:
        return self.requests.get(reserved.pod)

    def tell(self, events: Iterable[Event]) -> None:
        tell_all(self.cluster, events)

    def code(self, node: NodeName = NODE, gpus: int = 2, cpus: int = 0, uid: str = "new") -> str:
        """Of the refusal of a pod that asks for so many; empty: it fits."""
        question = asked(pod(container("main", gpus=gpus, cpus=cpus, gib=bool(cpus))), uid)
        filtered = self.scheduler.filter(question, (node,))
        return filtered.refused[node].code if node in filtered.refused else ""


def gpu(index: int) -> DeviceID:
    return DeviceID(f"GPU-{index:04d}")


def topology() -> Topology:
    return Topology(
        cpus=tuple(Cpu(id=i, core=i, socket=0, node=0, uncore=0) for i in range(8)),
        nodes=(NumaNode(id=0),),
        gpus=tuple(Gpu(id=gpu(i), index=i, pci=f"0000:0{i}:00.0", numa_affinity=(0,)) for i in range(4)),
        nics=(Nic(id=DeviceID("mlx5_0"), index=0, pci="0000:10:00.0"),),
    )


def allocation(name: str, pod: str | None, *gpus: int, namespace: str = "ml") -> Allocation:
    of = owner(pod, namespace=namespace) if pod else None
    return Allocation(id=AllocationID(name), owner=of, devices={GPU: tuple(map(gpu, gpus))}, cpus="0-3", affinity=(0,))


def tell(cluster: Cluster, event: Event) -> None:
    cluster.apply(heard_of(event, state_of(cluster, event.node), TIME))


def state_of(cluster: Cluster, node: NodeName) -> NodeState:
    return cluster.member(node).state if node in cluster else NodeState(node=node)


def heard_of(event: Event, had: NodeState, time: float | None, *, anew: bool = False) -> Delivery:
    """As the client hands it over, where this was known of the node before."""
    before = NodeState(node=event.node) if anew else had
    state = before.apply(event) if isinstance(event, LedgerFact) else None
    return Delivery(event=event, position=1, time=time, state=state, anew=anew)


def announce(cluster: Cluster, name: str, *allocations: Allocation) -> None:
    """A node with four GPUs, one of them unhealthy, that has granted these allocations."""
    health = {gpu(i): HEALTHY for i in range(3)}
    health[gpu(3)] = DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost")
    tell(cluster, discovered(topology(), name, revision=7, boot_id="boot"))
    tell(cluster, judged(health, name))
    writer = Writer(name, epoch=5)
    tell(cluster, writer.snapshot())
    for granted in allocations:
        tell(cluster, writer.grant(granted))
