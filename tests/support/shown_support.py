"""What is reserved on a node, and what the node shows, by chance: records, checkpoints, and what PodResources shows."""

from random import Random

import msgspec
from reservation_support import GPU, NIC, NODE, block, container, ids, reservation

from topoalign.core.model.allocations import Allocation, MemoryBlock, Owner
from topoalign.core.model.events import ContainerUsage, UsageObserved
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, KubeletRules
from topoalign.core.model.reservations import Reservation
from topoalign.core.state.fold import NodeState

RULES = KubeletRules(
    policy="none", scope="container", cpu_manager="static", memory_manager="Static", placement="topology"
)
GPUS, NICS, SIZES = ids("GPU-0", "GPU-1", "GPU-2", "GPU-3"), ids("nic-0", "nic-1"), ("memory", "hugepages-2Mi")
NAMES = {"uid-a": "a", "uid-a2": "a", "uid-b": "b"}
"""Two pods have the name `a`: the second was made when the first was gone."""
CONTAINERS = ("first", "main")
UNREAD = ("", "cannot be read")


def some_of(chance: Random, devices: tuple[DeviceID, ...]) -> tuple[DeviceID, ...]:
    return tuple(each for each in devices if chance.random() < 0.4)


def some_devices(chance: Random) -> dict[ResourceName, tuple[DeviceID, ...]]:
    return {GPU: some_of(chance, GPUS), NIC: some_of(chance, NICS)}


def some_memory(chance: Random) -> tuple[MemoryBlock, ...]:
    return tuple(block(name) for name in SIZES if chance.random() < 0.4)


def some_functions(chance: Random, devices: tuple[DeviceID, ...]) -> dict[DeviceID, tuple[str, ...]]:
    some = [(0,), (1,), (0, 1)]
    return {nic: tuple(f"{nic}.{each}" for each in chance.choice(some)) for nic in some_of(chance, devices)}


def some_cpus(chance: Random) -> str:
    return chance.choice(("", "0-1"))


def some_owner(chance: Random, uid: str) -> Owner:
    name = ContainerName(chance.choice(CONTAINERS))
    return Owner(namespace=Namespace("default"), pod=PodName(NAMES[uid]), container=name)


def some_reservation(
    chance: Random, uid: str, gpus_left: tuple[DeviceID, ...] = GPUS, nics_left: tuple[DeviceID, ...] = NICS
) -> Reservation:
    """Of these devices. The kubelet is asked for the NICs, or they come with the GPUs."""
    found = []
    for name in CONTAINERS:
        gpus, nics = some_of(chance, gpus_left), some_of(chance, nics_left)
        each = container(*gpus, name=name, cpus=some_cpus(chance), memory=some_memory(chance), co_allocated=nics)
        if chance.random() < 0.5:
            each = msgspec.structs.replace(each, devices={**each.devices, NIC: nics}, co_allocated={})
        role = "init" if name == "first" and chance.random() < 0.5 else "app"
        found.append(msgspec.structs.replace(each, role=role, virtual_functions=some_functions(chance, nics)))
    return msgspec.structs.replace(reservation("", *found, uid=uid), pod=PodName(NAMES[uid]))


def some_reservations(chance: Random) -> list[Reservation]:
    """Of two pods at most, of different names; no device is reserved for both."""
    pods = [chance.choice(("uid-a", "uid-a2")), "uid-b"]
    of_pod = {each: chance.choice(pods) for each in (*GPUS, *NICS)}
    left = {pod: [tuple(each for each in ids if of_pod[each] == pod) for ids in (GPUS, NICS)] for pod in pods}
    return [some_reservation(chance, pod, *left[pod]) for pod in pods if chance.random() < 0.8]


def some_allocation(chance: Random, number: int) -> Allocation:
    """With an owner and its UID, or without."""
    uid, given = chance.choice([*NAMES]), some_devices(chance)
    return Allocation(
        id=AllocationID(f"a-{number}"),
        owner=some_owner(chance, uid) if chance.random() < 0.7 else None,
        pod_uid=uid if chance.random() < 0.5 else "",
        devices=given,
        co_allocated=given[NIC] if chance.random() < 0.5 else (),
        virtual_functions=some_functions(chance, given[NIC]),
        cpus=some_cpus(chance),
        memory=some_memory(chance),
    )


def some_entry(chance: Random) -> CheckpointEntry:
    return CheckpointEntry(
        pod_uid=chance.choice([*NAMES]),
        container=ContainerName(chance.choice(CONTAINERS)),
        cpus=some_cpus(chance),
        memory=some_memory(chance),
        devices=some_devices(chance),
    )


def some_usage(chance: Random) -> UsageObserved:
    """Of a kubelet whose checkpoints are read or not; without one of a node that has no kubelet."""
    kubelet = KubeletObserved(
        rules=RULES,
        entries=tuple(some_entry(chance) for _ in range(chance.randrange(2))),
        unknown="too late" if chance.random() < 0.2 else "",
        cpus_unknown=chance.choice(UNREAD),
        memory_unknown=chance.choice(UNREAD),
        checkpoint_unknown=chance.choice(UNREAD),
    )
    shown = tuple(
        ContainerUsage(
            owner=some_owner(chance, chance.choice([*NAMES])),
            cpus=some_cpus(chance),
            memory=some_memory(chance),
            devices=some_devices(chance),
        )
        for _ in range(chance.randrange(2))
    )
    known = kubelet if chance.random() < 0.8 else None
    return UsageObserved(node=NODE, epoch=1, revision=1, containers=shown, kubelet=known)


def some_state(chance: Random) -> NodeState:
    record = [some_allocation(chance, number) for number in range(chance.randrange(3))]
    usage = some_usage(chance) if chance.random() < 0.8 else None
    return NodeState(node=NODE, allocations={each.id: each for each in record}, usage=usage)
