"""
What the services of one node have said: facts as `core` makes them, of a DGX A100 that has run containers for a while.

The allocator's facts are 40: an empty snapshot; 8 containers, each with a GPU of its own, are granted and bound, and 7 of
them end; a snapshot; 7 more are granted and bound, and a pod is refused. So 8 allocations are live at the end, and the
newest snapshot is the 25th fact.
"""

from collections.abc import Iterator
from uuid import NAMESPACE_OID, uuid5

import msgspec

from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    LedgerEvent,
    Owner,
    Reading,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine

MACHINE = "dgx-a100"
EPOCH = 1763715600000
"""Of every writer: milliseconds, as of a process that has started then."""
READINGS, FACTS, LIVE = 3, 40, 8
"""Of each node: readings, facts of the allocator, and the allocations that are live after them."""
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)
BARE = load_machine(MACHINE).topology


class History:
    """The facts of a node, by its number in the cluster, and its state after them."""

    def __init__(self, number: int) -> None:
        self.node = NodeName(f"gpu-{number:04}.example.com")
        self.gpus = [DeviceID(f"GPU-{uuid5(NAMESPACE_OID, f'{self.node}/{gpu.index}')}") for gpu in BARE.gpus]
        self.state = NodeState(node=self.node)
        self._boot = str(uuid5(NAMESPACE_OID, f"{self.node}/boot"))

    def readings(self) -> Iterator[Reading]:
        """Topology, health and usage."""
        topology = self._topology()
        yield TopologyDiscovered(
            node=self.node,
            epoch=EPOCH,
            revision=1,
            boot_id=self._boot,
            source=f"described: {MACHINE}",
            topology=topology,
        )
        devices = dict.fromkeys([*topology.gpu_by_id, *topology.nic_by_id], HEALTHY)
        yield DeviceHealthChanged(node=self.node, epoch=EPOCH, revision=1, devices=devices)
        yield UsageObserved(node=self.node, epoch=EPOCH, revision=1, containers=())

    def facts(self) -> Iterator[LedgerEvent]:
        """Those of the allocator; `state` has folded what was yielded."""
        yield self._snapshot()
        for number in range(LIVE):
            yield from self._started(number, self.gpus[number])
        for ended in list(self.state.allocations)[1:]:
            yield self._folded(
                AllocationReleased(node=self.node, epoch=EPOCH, seq=self._seq, allocation=ended, reason="gone")
            )
        yield self._snapshot()
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

    def _started(self, number: int, gpu: DeviceID) -> Iterator[LedgerEvent]:
        name = AllocationID(f"{EPOCH:x}-{self._seq}")
        given = Allocation(id=name, devices={GPU: (gpu,)}, boot=self._boot, machine=f"described: {MACHINE}")
        yield self._folded(AllocationGranted(node=self.node, epoch=EPOCH, seq=self._seq, allocation=given))
        pod = f"train-{self.node.split('.')[0]}-{number}"
        yield self._folded(
            AllocationBound(
                node=self.node,
                epoch=EPOCH,
                seq=self._seq,
                allocation=name,
                owner=Owner(
                    namespace=Namespace(f"team-{number % 4}"), pod=PodName(pod), container=ContainerName("main")
                ),
                boot=self._boot,
                pod_uid=str(uuid5(NAMESPACE_OID, pod)),
            )
        )

    def _snapshot(self) -> LedgerEvent:
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
