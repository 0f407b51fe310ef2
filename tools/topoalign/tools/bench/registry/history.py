"""
What the services of one node have said: facts as `core` makes them, of a DGX A100 that has run containers for a while.

The allocator's facts are 40: an empty snapshot; 8 containers, each with a GPU of its own, are granted and bound, and 7 of
them end; a snapshot; 7 more are granted and bound, and a pod is refused. So 8 allocations are live at the end, and the
newest snapshot is the 25th fact. `UsageObserved` has the exclusive CPUs of these 8 containers, the kubelet's rules, and what
its checkpoints list.
"""

from collections.abc import Iterator
from uuid import NAMESPACE_OID, uuid5

import msgspec

from topoalign.core.model.events import (
    HEALTHY,
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    ContainerUsage,
    DeviceHealthChanged,
    KubeletObserved,
    LedgerEvent,
    Owner,
    Reading,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine

MACHINE = "dgx-a100"
EPOCH = 1763715600000
"""Of every writer: milliseconds, as of a process that has started then."""
READINGS = 3
FACTS = 40
LIVE = 8
"""Of each node: readings, facts of the allocator, and the allocations that are live after them."""
MORE = FACTS - 1 + LIVE
"""Facts of each further round: all but the first snapshot, and the end of what was live."""
BARE = load_machine(MACHINE).topology
RULES = KubeletRules(
    policy="best-effort",
    scope="container",
    cpu_manager="static",
    reserved_cpus="0-7",
    memory_manager="None",
    placement="topology",
)


class History:
    """The facts of a node, by its number in the cluster, and its state after them."""

    def __init__(self, number: int) -> None:
        self.node = NodeName(f"gpu-{number:04}.example.com")
        self.gpus = [DeviceID(f"GPU-{uuid5(NAMESPACE_OID, f'{self.node}/{gpu.index}')}") for gpu in BARE.gpus]
        self.state = NodeState(node=self.node)
        self.revision = 0
        """Of the readings."""
        self._boot = str(uuid5(NAMESPACE_OID, f"{self.node}/boot"))

    @property
    def newest(self) -> dict[str, tuple[int, int]]:
        """`topology`, `health` and `usage` -> (epoch, revision) of the newest reading."""
        return dict.fromkeys(("topology", "health", "usage"), (EPOCH, self.revision))

    def readings(self) -> Iterator[Reading]:
        """Topology, health and usage, of the next revision each time."""
        self.revision += 1
        topology = self._topology()
        yield TopologyDiscovered(
            node=self.node,
            epoch=EPOCH,
            revision=self.revision,
            boot_id=self._boot,
            source=f"described: {MACHINE}",
            topology=topology,
        )
        devices = dict.fromkeys([*topology.gpu_by_id, *topology.nic_by_id], HEALTHY)
        yield DeviceHealthChanged(node=self.node, epoch=EPOCH, revision=self.revision, devices=devices)
        yield self._usage()

    def facts(self, rounds: int = 1) -> Iterator[LedgerEvent]:
        """
        Those of the allocator; `state` has folded what was yielded. `rounds`: so often all of it happens, after the end of
        what is live from the round before.
        """
        yield self.snapshot()
        for _ in range(rounds):
            for ended in list(self.state.allocations):
                yield self._ended(ended)
            yield from self._round()

    def _round(self) -> Iterator[LedgerEvent]:
        for number in range(LIVE):
            yield from self._started(number, self.gpus[number])
        for ended in list(self.state.allocations)[1:]:
            yield self._ended(ended)
        yield self.snapshot()
        for number in range(1, LIVE):
            yield from self._started(LIVE + number, self.gpus[number])
        yield self._folded(
            AllocationRefused(
                node=self.node,
                epoch=EPOCH,
                seq=self._seq,
                namespace=Namespace("research"),
                pod=PodName("train-0"),
                container=ContainerName("main"),
                reason="UnexpectedAdmissionError",
                code="NotEnoughDevices",
                finding="1 nvidia.com/gpu is asked for, and 0 are free",
                remedy="wait until a container ends, or ask for less",
            )
        )

    def _ended(self, allocation: AllocationID) -> LedgerEvent:
        return self._folded(
            AllocationReleased(node=self.node, epoch=EPOCH, seq=self._seq, allocation=allocation, reason="gone")
        )

    def _started(self, number: int, gpu: DeviceID) -> Iterator[LedgerEvent]:
        name = AllocationID(f"{EPOCH:x}-{self._seq}")
        given = Allocation(id=name, devices={GPU: (gpu,)}, boot=self._boot, machine=f"described: {MACHINE}")
        yield self._folded(AllocationGranted(node=self.node, epoch=EPOCH, seq=self._seq, allocation=given))
        owner = self._owner(number)
        yield self._folded(
            AllocationBound(
                node=self.node,
                epoch=EPOCH,
                seq=self._seq,
                allocation=name,
                owner=owner,
                boot=self._boot,
                pod_uid=uid(owner),
            )
        )

    def _owner(self, number: int) -> Owner:
        pod = f"train-{self.node.split('.')[0]}-{number}"
        return Owner(namespace=Namespace(f"team-{number % 4}"), pod=PodName(pod), container=ContainerName("main"))

    def _usage(self) -> UsageObserved:
        """Of the containers that are live after all facts: the first, and the seven that were started last."""
        owners = [self._owner(0), *(self._owner(LIVE + number) for number in range(1, LIVE))]
        cpus = [f"{8 * number + 8}-{8 * number + 15}" for number in range(LIVE)]
        entries = tuple(
            CheckpointEntry(
                pod_uid=uid(owner), container=owner.container, cpus=own, devices={GPU: (gpu,)}, mounted=True
            )
            for owner, own, gpu in zip(owners, cpus, self.gpus, strict=True)
        )
        return UsageObserved(
            node=self.node,
            epoch=EPOCH,
            revision=self.revision,
            containers=tuple(ContainerUsage(owner=owner, cpus=own) for owner, own in zip(owners, cpus, strict=True)),
            kubelet=KubeletObserved(version="1.34.0", rules=RULES, registered=(GPU,), entries=entries),
        )

    def snapshot(self) -> LedgerEvent:
        """The live allocations, as the next fact."""
        live = tuple(self.state.allocations.values())
        return self._folded(
            AllocationsSnapshot(node=self.node, epoch=EPOCH, seq=self._seq, allocations=live, digest=self.state.digest)
        )

    def _folded(self, event: LedgerEvent) -> LedgerEvent:
        self.state = self.state.fold(event)
        return event

    @property
    def _seq(self) -> int:
        """Of the fact that comes next."""
        return self.state.seq + 1

    def _topology(self) -> Topology:
        text = msgspec.json.encode(BARE)
        for gpu, uuid in zip(BARE.gpus, self.gpus, strict=True):
            text = text.replace(b'"%s"' % gpu.id.encode(), b'"%s"' % uuid.encode())
        return msgspec.json.decode(text, type=Topology)


def uid(owner: Owner) -> str:
    """Of the pod of a container."""
    return str(uuid5(NAMESPACE_OID, owner.pod))
