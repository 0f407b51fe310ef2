"""Reservations for tests: of GPUs, CPUs and memory of `node-1`."""

import msgspec
from fact_support import owner

from topoalign.core.model.allocations import Allocation, MemoryBlock
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName, ResourceName
from topoalign.core.model.reservations import Reservation, ReservedContainer

NODE = NodeName("node-1")
GPU = ResourceName("nvidia.com/gpu")
NIC = ResourceName("rdma/hca")


def ids(*names: str) -> tuple[DeviceID, ...]:
    return tuple(map(DeviceID, names))


def block(resource: str = "memory") -> MemoryBlock:
    return MemoryBlock(resource=ResourceName(resource), nodes=(0,), size=1024, taken=(1024,))


def container(
    *gpus: str,
    name: str = "main",
    cpus: str = "",
    memory: tuple[MemoryBlock, ...] = (),
    co_allocated: tuple[str, ...] = (),
) -> ReservedContainer:
    return ReservedContainer(
        container=ContainerName(name),
        devices={GPU: ids(*gpus)} if gpus else {},
        co_allocated={NIC: ids(*co_allocated)} if co_allocated else {},
        cpus=cpus,
        memory=memory,
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
