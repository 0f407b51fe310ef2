"""Facts of a node's allocator for tests, made in the order in which it would say them."""

from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    LedgerEvent,
    Owner,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.state.fold import NodeState


def owner(pod: str) -> Owner:
    return Owner(namespace=Namespace("default"), pod=PodName(pod), container=ContainerName("main"))


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

    def snapshot(self) -> LedgerEvent:
        return self.say(
            AllocationsSnapshot(
                node=self.node,
                epoch=self.epoch,
                seq=self.seq,
                allocations=tuple(self.state.allocations.values()),
                memory=dict(self.state.memory),
                digest=self.state.digest,
            )
        )

    def grant(self, name: str, *devices: str) -> LedgerEvent:
        allocation = Allocation(id=AllocationID(name), devices={GPU: tuple(DeviceID(device) for device in devices)})
        return self.say(AllocationGranted(node=self.node, epoch=self.epoch, seq=self.seq, allocation=allocation))

    def bind(self, name: str, pod: str) -> LedgerEvent:
        return self.say(
            AllocationBound(
                node=self.node, epoch=self.epoch, seq=self.seq, allocation=AllocationID(name), owner=owner(pod)
            )
        )

    def release(self, name: str) -> LedgerEvent:
        return self.say(
            AllocationReleased(
                node=self.node, epoch=self.epoch, seq=self.seq, allocation=AllocationID(name), reason="released"
            )
        )
