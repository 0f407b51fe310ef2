"""
Facts of a node for tests: of its discovery one by one, of the registries' reservations, and of its allocator in the order in
which it would say them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from topoalign.core.model.allocations import Allocation, MemoryBlock
from topoalign.core.model.events import (
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    LedgerEvent,
    Owner,
    ReservationsChanged,
    TopologyDiscovered,
)
from topoalign.core.model.ids import (
    GPU,
    NIC,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    NodeName,
    PodName,
    ResourceName,
)
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

HEALTHY = DeviceHealth(state=HealthState.HEALTHY)
NODE = NodeName("node-1")


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


def owner(pod: str, container: str = "main", namespace: str = "default") -> Owner:
    return Owner(namespace=Namespace(namespace), pod=PodName(pod), container=ContainerName(container))


def health_of(machine: Topology, unhealthy: Collection[str] = ()) -> dict[DeviceID, DeviceHealth]:
    """All devices of the machine are healthy but these."""
    ill = DeviceHealth(state=HealthState.UNHEALTHY)
    cards = (*machine.gpu_by_id, *machine.nic_by_id, *(each.id for each in machine.others))
    return {card: ill if card in unhealthy else HEALTHY for card in cards}


def mig_device(uuid: str, gpu_instance: int = 0, **more: Any) -> MigDevice:
    """A MIG instance, 1g.10gb where nothing else is given."""
    given = {"profile": "1g.10gb", "compute_instance": 0, "memory": 10 << 30, **more}
    return MigDevice(uuid=DeviceID(uuid), gpu_instance=gpu_instance, **given)


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


def ids(*names: str) -> tuple[DeviceID, ...]:
    return tuple(map(DeviceID, names))


def block(resource: str = "memory") -> MemoryBlock:
    return MemoryBlock(resource=ResourceName(resource), nodes=(0,), size=1024, taken=(1024,))


def reserved_container(
    *gpus: str, name: str = "main", co_allocated: Sequence[str] = (), **more: Any
) -> ReservedContainer:
    return ReservedContainer(
        container=ContainerName(name),
        devices={GPU: ids(*gpus)} if gpus else {},
        co_allocated={NIC: ids(*co_allocated)} if co_allocated else {},
        **more,
    )


def reservation(
    pod: str, *containers: ReservedContainer, seconds: float = 30.0, gang: str = "", uid: str = ""
) -> Reservation:
    """Of pod `default/POD` with the UID `uid-POD` or this one."""
    return Reservation(
        pod_uid=uid or f"uid-{pod}",
        namespace=Namespace("default"),
        pod=PodName(pod),
        containers=containers,
        seconds_left=seconds,
        gang=gang,
    )


def changed(
    *reservations: Reservation, seq: int = 1, writer: str = "r1", made: tuple[str, ...] = ()
) -> ReservationsChanged:
    return ReservationsChanged(node=NODE, epoch=1, writer=writer, seq=seq, reservations=reservations, made=made)


def allocated(*gpus: str, pod: str = "", name: str = "main", number: int = 1) -> Allocation:
    """What the device plugin gave; its owner is known if `pod` is given."""
    held = Allocation(id=AllocationID(f"a-{number}"), devices={GPU: ids(*gpus)})
    return msgspec.structs.replace(held, owner=owner(pod, name), pod_uid=f"uid-{pod}") if pod else held
