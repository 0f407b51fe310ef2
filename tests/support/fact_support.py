"""Facts of a node for tests: of its discovery one by one, and of its allocator in the order in which it would say them."""

from collections.abc import Mapping
from typing import Any

from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    LedgerEvent,
    Owner,
    TopologyDiscovered,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


def discovered(
    topology: Topology, node: str = "node-1", revision: int = 1, boot_id: str = "b", source: str = "described: test"
) -> TopologyDiscovered:
    """The hardware of a node as its discovery reports it."""
    return TopologyDiscovered(
        node=NodeName(node), epoch=1, revision=revision, boot_id=boot_id, source=source, topology=topology
    )


def judged(devices: Mapping[DeviceID, DeviceHealth], node: str = "node-1", revision: int = 1) -> DeviceHealthChanged:
    """The health of a node's devices as its discovery reports it."""
    return DeviceHealthChanged(node=NodeName(node), epoch=1, revision=revision, devices=dict(devices))


def owner(pod: str, container: str = "main") -> Owner:
    return Owner(namespace=Namespace("default"), pod=PodName(pod), container=ContainerName(container))


class Writer:
    """Says facts as an allocator does: numbered without gaps, each true after those before."""

    def __init__(self, node: str = "node-1", epoch: int = 7) -> None:
        self.node, self.epoch = NodeName(node), epoch
        self.state = NodeState(node=self.node)
        self.said: list[LedgerEvent] = []

    @property
    def seq(self) -> int:
        return len(self.said) + 1

    def say(self, fact: LedgerEvent) -> LedgerEvent:
        self.state = self.state.apply(fact)
        self.said.append(fact)
        return fact

    def record(self, kind: type[LedgerEvent], **fields: Any) -> LedgerEvent:
        return self.say(kind(node=self.node, epoch=self.epoch, seq=self.seq, **fields))

    def snapshot(self) -> LedgerEvent:
        live, memory = tuple(self.state.allocations.values()), dict(self.state.memory)
        return self.record(AllocationsSnapshot, allocations=live, memory=memory, digest=self.state.digest)

    def grant(self, given: Allocation | str, *devices: str) -> LedgerEvent:
        """This allocation, or one of this name with these GPUs."""
        if isinstance(given, str):
            given = Allocation(id=AllocationID(given), devices={GPU: tuple(map(DeviceID, devices))})
        return self.record(AllocationGranted, allocation=given)

    def bind(self, name: str, pod: Owner | str, uid: str = "") -> LedgerEvent:
        to = owner(pod) if isinstance(pod, str) else pod
        return self.record(AllocationBound, allocation=AllocationID(name), owner=to, pod_uid=uid)

    def release(self, name: str) -> LedgerEvent:
        return self.record(AllocationReleased, allocation=AllocationID(name), reason="released")
