"""
The nodes of a cluster, each with GPUs of its own and a state that hardly any other has.

Half of them are HGX H100 with policy restricted, half DGX A100 with policy single-numa-node; all have the static CPU manager
and the static memory manager. A container has one GPU, and on the NUMA node of that GPU 2 to 12 CPUs and 8 to 60 GiB: four
containers on a node that is half full, eight on one that is full. What they have beside GPUs stands in `UsageObserved`. On a
node whose GPUs are shared a container has half of the shares of its GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from uuid import NAMESPACE_OID, uuid5

import msgspec

from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.events import (
    HEALTHY,
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    ContainerUsage,
    DeviceHealthChanged,
    Event,
    KubeletObserved,
    MemoryBlock,
    Owner,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.holdings import handed_out
from topoalign.core.model.ids import (
    GPU,
    MEMORY,
    NIC,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    NodeName,
    PodName,
)
from topoalign.core.model.kubelet import CheckpointEntry, KubeletRules
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine
from topoalign.tools.bench.registry.history import EPOCH

HALF = 4
ALL = 8
"""GPUs that are held of a node."""
KEPT_CPUS = 2
"""Of each NUMA node for the system."""
FACTS = 4
"""That a node has said at first."""


class Kind(msgspec.Struct, frozen=True):
    """A kind of machine, and the rules of its kubelet."""

    machine: str
    bare: Topology
    text: bytes
    """The same in JSON."""
    rules: KubeletRules
    cpus: Mapping[int, tuple[int, ...]]
    """NUMA node -> those of its CPUs that containers may have."""


def kind(machine: str, policy: str) -> Kind:
    """The machine of the catalogue with this name, under this policy."""
    bare = load_machine(machine).topology
    inside = {node: sorted(cpus) for node, cpus in bare.cpus_by_node.items()}
    rules = KubeletRules(
        policy=policy,
        scope="container",
        cpu_manager="static",
        reserved_cpus=format_cpuset(cpu for cpus in inside.values() for cpu in cpus[:KEPT_CPUS]),
        memory_manager="Static",
        reserved_memory={node.id: {MEMORY: GIB} for node in bare.nodes},
        placement="topology",
    )
    cpus = {node: tuple(each[KEPT_CPUS:]) for node, each in inside.items()}
    return Kind(machine, bare, msgspec.json.encode(bare), rules, cpus)


KINDS = (kind("hgx-h100", "restricted"), kind("dgx-a100", "single-numa-node"))


class Container(msgspec.Struct, frozen=True):
    """A container on a node."""

    number: int
    owner: Owner
    uid: str
    """Of its pod."""
    gpus: tuple[DeviceID, ...]
    cpus: str
    memory: tuple[MemoryBlock, ...]


class BusyNode:
    """A node, by its number in the cluster: its state after the facts that were taken from here."""

    def __init__(self, number: int, gpus_held: int, replicas: int = 1, kinds: Sequence[Kind] = KINDS) -> None:
        """`replicas`: in so many ways each GPU is shared. `kinds`: nodes take turns with them."""
        self.node = NodeName(f"gpu-{number:05}.example.com")
        self.kind = kinds[number % len(kinds)]
        self.state = NodeState(node=self.node)
        self.revision = 0
        """Of the usage; topology and health have one."""
        self._gpus = [
            DeviceID(f"GPU-{uuid5(NAMESPACE_OID, f'{self.node}/{each.index}')}") for each in self.kind.bare.gpus
        ]
        self._replicas = replicas
        self._boot = str(uuid5(NAMESPACE_OID, f"{self.node}/boot"))
        random = Random(number)
        left = {node: list(cpus) for node, cpus in self.kind.cpus.items()}
        held = sorted(random.sample(range(len(self._gpus)), min(gpus_held, len(self._gpus))))
        self.containers = [self._container(gpu, left, random) for gpu in held]
        """Those that run."""

    @property
    def newest(self) -> dict[str, tuple[int, int]]:
        """`topology`, `health` and `usage` -> (epoch, revision) of the newest reading."""
        return {"topology": (EPOCH, 1), "health": (EPOCH, 1), "usage": (EPOCH, self.revision)}

    def said(self) -> Iterator[Event]:
        """Topology, health, usage, and a snapshot of the allocations."""
        text = self.kind.text
        for gpu, uuid in zip(self.kind.bare.gpus, self._gpus, strict=True):
            text = text.replace(b'"%s"' % gpu.id.encode(), b'"%s"' % uuid.encode())
        topology = msgspec.json.decode(text, type=Topology)
        if self._replicas > 1:
            offer = Offer(resource=GPU, devices=tuple(self._gpus), replicas=self._replicas)
            topology = msgspec.structs.replace(topology, offers=(offer,))
        yield TopologyDiscovered(
            node=self.node, epoch=EPOCH, revision=1, boot_id=self._boot, source="nvml", topology=topology
        )
        devices = dict.fromkeys([*self._gpus, *topology.nic_by_id], HEALTHY)
        yield DeviceHealthChanged(node=self.node, epoch=EPOCH, revision=1, devices=devices)
        yield self._usage()
        live = {each.id: each for each in map(self._allocation, self.containers)}
        digest = msgspec.structs.replace(self.state, allocations=live).digest
        snapshot = AllocationsSnapshot(
            node=self.node, epoch=EPOCH, seq=1, allocations=tuple(live.values()), digest=digest
        )
        self.state = self.state.fold(snapshot)
        yield snapshot

    def ended(self) -> Iterator[Event]:
        """The first of its containers ends."""
        return self.end_pod(self.containers[0].uid)

    def end_pod(self, uid: str) -> Iterator[Event]:
        """All containers of a pod end. The usage comes first: who has the other has it too, as a rule."""
        gone = [each for each in self.containers if each.uid == uid]
        self.containers = [each for each in self.containers if each.uid != uid]
        yield self._usage()
        for each in gone:
            released = AllocationReleased(
                node=self.node,
                epoch=EPOCH,
                seq=self.state.seq + 1,
                allocation=self._allocation(each).id,
                reason="gone",
            )
            self.state = self.state.fold(released)
            yield released

    def admitted(self, uid: str, given: Allocation) -> Iterator[Event]:
        """Its kubelet admits a container of the pod with this UID, and gives it this."""
        owner = given.owner
        seq = self.state.seq + 1
        assert owner is not None, "a decision names the container"
        number = len(self._gpus) + seq
        self.containers.append(Container(number, owner, uid, given.devices.get(GPU, ()), given.cpus, given.memory))
        record = self._allocation(self.containers[-1])
        bare = msgspec.structs.replace(record, owner=None, pod_uid="")
        granted = AllocationGranted(node=self.node, epoch=EPOCH, seq=seq, allocation=bare)
        bound = AllocationBound(
            node=self.node, epoch=EPOCH, seq=seq + 1, allocation=record.id, owner=owner, boot=self._boot, pod_uid=uid
        )
        self.state = self.state.fold(granted).fold(bound)
        yield granted
        yield self._usage()
        yield bound

    def _container(self, gpu: int, left: Mapping[int, list[int]], random: Random) -> Container:
        (place,) = self.kind.bare.listed_nodes(self.kind.bare.gpus[gpu].numa_affinity) or (0,)
        neighbours = sum(each.numa_affinity == self.kind.bare.gpus[gpu].numa_affinity for each in self.kind.bare.gpus)
        most = len(self.kind.cpus[place]) // neighbours
        cpus = [left[place].pop(0) for _ in range(min(most, random.randrange(2, 13)))]
        size = random.randrange(8, 61) * GIB
        pod = PodName(f"train-{self.node.split('.')[0]}-{gpu}")
        return Container(
            gpu + 1,
            Owner(namespace=Namespace("research"), pod=pod, container=ContainerName("main")),
            str(uuid5(NAMESPACE_OID, pod)),
            tuple(islice(handed_out(self._gpus[gpu], self._replicas), max(1, self._replicas // 2))),
            format_cpuset(cpus),
            (MemoryBlock(resource=MEMORY, nodes=(place,), size=size, taken=(size,)),),
        )

    def _allocation(self, container: Container) -> Allocation:
        return Allocation(
            id=AllocationID(f"{EPOCH:x}-{container.number}"),
            owner=container.owner,
            devices={GPU: container.gpus},
            boot=self._boot,
            pod_uid=container.uid,
        )

    def _usage(self) -> UsageObserved:
        """Of the containers that run, and what the checkpoints list for them."""
        self.revision += 1
        memory = NodeState(node=self.node)
        for each in self.containers:
            memory = memory.holding(Allocation(id=AllocationID(each.uid), memory=each.memory))
        entries = tuple(
            CheckpointEntry(
                pod_uid=each.uid,
                container=each.owner.container,
                cpus=each.cpus,
                memory=each.memory,
                devices={GPU: each.gpus},
                mounted=True,
            )
            for each in self.containers
        )
        return UsageObserved(
            node=self.node,
            epoch=EPOCH,
            revision=self.revision,
            containers=tuple(
                ContainerUsage(owner=each.owner, cpus=each.cpus, memory=each.memory) for each in self.containers
            ),
            kubelet=KubeletObserved(
                version="v1.36.2",
                rules=self.kind.rules,
                devices={},
                registered=(GPU, NIC),
                entries=entries,
                memory=dict(memory.memory),
            ),
        )
