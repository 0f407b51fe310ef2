"""
Which parts of what is reserved a node shows, by chance and against a naive reference; what the view of the cluster holds
ends by the same rule.
"""

from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from fact_support import NODE, block, changed, ids, reservation, reserved_container
from faults_support import THOROUGH
from view_support import RULES, asked

from topoalign.core.model.allocations import Allocation, MemoryBlock, Owner
from topoalign.core.model.events import ContainerUsage, UsageObserved
from topoalign.core.model.ids import (
    CPU,
    GPU,
    NIC,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    PodName,
    ResourceName,
)
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, KubeletRules
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations, holding_reserved
from topoalign.core.state.reserved_parts import ReservedPart, reported_parts
from topoalign.registry.scheduling.cluster_state.assumed_pods import NodePods

KUBELET_RULES = KubeletRules(
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
        each = reserved_container(
            *gpus, name=name, cpus=some_cpus(chance), memory=some_memory(chance), co_allocated=nics
        )
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
        rules=KUBELET_RULES,
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


SEEDS = 20_000 if THOROUGH else 1_000


def witnesses(state: NodeState) -> Iterator[tuple[str, tuple[str, str], ContainerName, ResourceName]]:
    """UID, or names where it is not known, and container, of all that is given: a resource each time."""
    for held in state.allocations.values():
        if held.owner is not None:
            names = ("", "") if held.pod_uid else (str(held.owner.namespace), str(held.owner.pod))
            for resource, ids in held.devices.items():
                if set(ids) - set(held.co_allocated):
                    yield held.pod_uid, names, held.owner.container, resource
            for resource in (*((CPU,) if held.cpus else ()), *(each.resource for each in held.memory)):
                yield held.pod_uid, names, held.owner.container, resource
    if state.usage is None:
        return
    kubelet = state.usage.kubelet
    for entry in kubelet.entries if kubelet else ():
        for resource in resources_of(entry):
            yield entry.pod_uid, ("", ""), entry.container, resource
    for used in state.usage.containers:
        for resource in resources_of(used):
            kind = resource if resource == CPU else ("devices" if resource in (GPU, NIC) else "memory")
            why = {CPU: "cpus_unknown", "memory": "memory_unknown", "devices": "checkpoint_unknown"}[kind]
            if kubelet is None or kubelet.unknown or getattr(kubelet, why):
                yield "", (used.owner.namespace, used.owner.pod), used.owner.container, resource


def resources_of(held: CheckpointEntry | ContainerUsage) -> list[ResourceName]:
    given = [resource for resource, ids in held.devices.items() if ids]
    return [*given, *([CPU] if held.cpus else []), *(each.resource for each in held.memory)]


def is_shown(
    part: ReservedPart,
    reserved: ReservedContainer,
    pod: Reservation,
    state: NodeState,
    by: tuple[ReservedContainer, ...] = (),
) -> bool:
    """By what the container of the pod has been given, or one of the others, as everybody sees it."""
    comes_with = GPU if any(part.device in ids for ids in reserved.co_allocated.values()) else part.resource
    return any(
        container in [each.container for each in (reserved, *by)]
        and resource == comes_with
        and (uid == pod.pod_uid or names == (pod.namespace, pod.pod))
        for uid, names, container, resource in witnesses(state)
    )


def at(reserved: ReservedContainer, pod: Reservation) -> int:
    """The place of a container in the order in which they are decided."""
    return next(number for number, each in enumerate(pod.containers) if each is reserved)


def had_its_turn(part: ReservedPart, reserved: ReservedContainer, pod: Reservation, state: NodeState) -> bool:
    """An init container, of which the record may say nothing any more, by what the containers after it were given."""
    return reserved.role == "init" and is_shown(part, reserved, pod, state, pod.containers[at(reserved, pod) + 1 :])


def is_held(
    part: ReservedPart, reserved: ReservedContainer, pod: Reservation, state: NodeState, former: set[AllocationID]
) -> bool:
    """
    By an allocation that was not there before the reservation: of the part itself, or of all its functions. What init
    containers before it have may still be theirs.
    """
    init = [each for each in pod.containers[: at(reserved, pod)] if each.role == "init"]
    lent = [ids for each in init for ids in (*each.devices.values(), *each.co_allocated.values())]
    if not part.device or any(part.device in ids for ids in lent):
        return False
    functions = reserved.virtual_functions.get(part.device, ())

    def has(held: Allocation, what: str) -> bool:
        own = held.virtual_functions.get(part.device)
        return what in own if own is not None else part.device == what and part.device in held.device_ids

    holders = [
        [name for name, held in state.allocations.items() if has(held, what)] for what in functions or (part.device,)
    ]
    return all(names and names[-1] not in former for names in holders)


def all_parts(pod: Reservation, reserved: ReservedContainer) -> Iterator[ReservedPart]:
    for resource in (GPU, NIC):
        for devices in (reserved.devices, reserved.co_allocated):
            yield from (
                ReservedPart(pod.pod_uid, reserved.container, resource, each) for each in devices.get(resource, ())
            )
    yield from (ReservedPart(pod.pod_uid, reserved.container, each.resource) for each in reserved.memory)
    if reserved.cpus:
        yield ReservedPart(pod.pod_uid, reserved.container, CPU)


@pytest.mark.parametrize("first", range(0, SEEDS, 200))
def test_a_part_is_shown_by_what_its_container_was_given(first: int) -> None:
    for seed in range(first, first + 200):
        chance = Random(seed)
        reserved, state = some_reservations(chance), some_state(chance)
        expected = {
            part
            for pod in reserved
            for each in pod.containers
            for part in all_parts(pod, each)
            if is_shown(part, each, pod, state)
        }

        assert expected == {*reported_parts(state, reserved)}, seed


@pytest.mark.parametrize("first", range(0, SEEDS, 200))
def test_a_nodes_own_record_shows_a_part_by_who_holds_it(first: int) -> None:
    """Its owner may not be known yet. What was held before the reservation shows nothing of it."""
    for seed in range(first, first + 200):
        chance = Random(seed)
        reserved, state = some_reservations(chance), some_state(chance)
        former = {pod.pod_uid: {each for each in state.allocations if chance.random() < 0.3} for pod in reserved}
        expected = {
            part
            for pod in reserved
            for each in pod.containers
            for part in all_parts(pod, each)
            if is_shown(part, each, pod, state)
            or had_its_turn(part, each, pod, state)
            or is_held(part, each, pod, state, former[pod.pod_uid])
        }

        assert expected == {*reported_parts(state, reserved, former, own=True)}, seed


VIEW_SEEDS = 4_000 if THOROUGH else 400


def holding(known: NodeReservations) -> NodeState:
    """An empty node on which what is reserved is held."""
    state = NodeState(node=NODE)
    for each in known.held(0.0):
        state = holding_reserved(state, each)
    return state


@pytest.mark.parametrize("first", range(0, VIEW_SEEDS, 100))
def test_a_view_holds_what_is_reserved_and_not_shown(first: int) -> None:
    for seed in range(first, first + 100):
        chance = Random(seed)
        known, holds = NodeReservations().apply(changed(*some_reservations(chance)), 1, 0.0), NodePods()
        for state in (some_state(chance) for _ in range(4)):
            known = known.observe(state)
            holds.reserve(known.held(0.0))
            holds.settle(state, state, RULES)

            assert holding(known).allocations == holds.added_to(NodeState(node=NODE), RULES).allocations, seed


@pytest.mark.parametrize("first", range(0, VIEW_SEEDS, 100))
def test_what_a_bound_pod_holds_ends_as_its_reservation_would(first: int) -> None:
    """Also where the reservation expires, before or after the node has shown a part of it."""
    for seed in range(first, first + 100):
        chance = Random(seed)
        reserved = some_reservation(chance, "uid-a2")
        known, holds = NodeReservations().apply(changed(reserved), 1, 0.0), NodePods()
        pod = PodRequest(namespace=reserved.namespace, name=reserved.pod, containers=())
        holds.reserve([reserved])
        holds.expect(asked(pod, reserved.pod_uid))
        for number in range(4):
            if number == seed % 3:
                holds.reserve([])
            state = some_state(chance)
            known = known.observe(state)
            holds.settle(state, state, RULES)

            assert holding(known).allocations == holds.added_to(NodeState(node=NODE), RULES).allocations, seed
