"""The parts of what a container has: the devices of a resource, its CPUs, its memory; and which of them a node shows."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.state.fold import NodeState

Part = tuple[ContainerName, str]
"""A container, and what of it: the name of a resource of devices, CPUS or MEMORY."""
Shown = Mapping[str, Collection[Part]]
"""UID of a pod, or `namespace/name` where the node does not know it -> the parts that the node shows."""
PodNames = tuple[Namespace, PodName]

CPUS, MEMORY = "cpus", "memory"


def shown_by(state: NodeState, entries: Sequence[CheckpointEntry]) -> Shown:
    """What a node shows of its pods: by its record, and by its kubelet's checkpoints or what stands for them."""
    shown: dict[str, set[Part]] = {}
    for held in state.allocations.values():
        owner = held.owner
        if owner is not None:
            uid = held.pod_uid or (f"{owner.namespace}/{owner.pod}" if owner.namespace else owner.pod)
            shown.setdefault(uid, set()).update(parts(held))
    for entry in entries:
        found = shown.setdefault(entry.pod_uid, set())
        found.update((entry.container, resource) for resource in entry.devices)
        found.update((entry.container, kind) for kind, some in ((CPUS, entry.cpus), (MEMORY, entry.memory)) if some)
    return shown


def parts_of(shown: Shown, uid: str, names: PodNames) -> set[Part]:
    """The parts that a node shows of this pod: under its UID, and where the node knows none, under its names."""
    return {*shown.get(uid, ()), *shown.get("/".join(names), ())}


def parts(allocation: Allocation) -> Iterator[Part]:
    """The parts of an allocation; companions are a part of the GPUs."""
    container = container_of(allocation)
    yield from ((container, resource) for resource, ids in allocation.from_kubelet.items() if ids)
    if allocation.cpus:
        yield container, CPUS
    if allocation.memory:
        yield container, MEMORY


def container_of(allocation: Allocation) -> ContainerName:
    """The container of an allocation; empty where it is not known."""
    return allocation.owner.container if allocation.owner is not None else ContainerName("")


def without_parts(allocation: Allocation, ended: Collection[Part]) -> Allocation:
    """An allocation without the parts that have ended."""
    container = container_of(allocation)
    rest = {
        name: tuple(each for each in ids if (container, GPU if each in allocation.companions else name) not in ended)
        for name, ids in allocation.devices.items()
    }
    devices = {name: ids for name, ids in rest.items() if ids}
    return msgspec.structs.replace(
        allocation,
        devices=devices,
        companions=companions_within(allocation, devices),
        virtual_functions=functions_within(allocation, devices),
        cpus="" if (container, CPUS) in ended else allocation.cpus,
        memory=() if (container, MEMORY) in ended else allocation.memory,
    )


def not_given(allocation: Allocation, state: NodeState) -> Allocation:
    """An allocation without devices, virtual functions and CPUs that somebody has in this state."""
    owned = state.ownership
    functions = {
        nic: tuple(each for each in addresses if each not in owned.functions_in_use)
        for nic, addresses in allocation.virtual_functions.items()
        if nic not in owned.held_whole
    }
    devices = {
        name: left
        for name, ids in allocation.devices.items()
        if (
            left := tuple(
                each
                for each in ids
                if (functions.get(each) if each in allocation.virtual_functions else not owned.is_held(each))
            )
        )
    }
    kept = msgspec.structs.replace(allocation, virtual_functions={nic: some for nic, some in functions.items() if some})
    return msgspec.structs.replace(
        allocation,
        devices=devices,
        companions=companions_within(allocation, devices),
        virtual_functions=functions_within(kept, devices),
        cpus=format_cpuset(allocation.cpu_ids - owned.cpus_in_use),
    )


def companions_within(
    allocation: Allocation, devices: Mapping[ResourceName, tuple[DeviceID, ...]]
) -> tuple[DeviceID, ...]:
    """The companions of an allocation that are among these devices."""
    left = {each for ids in devices.values() for each in ids}
    return tuple(each for each in allocation.companions if each in left)


def functions_within(
    allocation: Allocation, devices: Mapping[ResourceName, tuple[DeviceID, ...]]
) -> dict[DeviceID, tuple[str, ...]]:
    """The virtual functions of an allocation that belong to one of these devices."""
    nics = {each for ids in devices.values() for each in ids}
    return {nic: addresses for nic, addresses in allocation.virtual_functions.items() if nic in nics}
