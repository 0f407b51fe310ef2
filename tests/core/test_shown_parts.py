"""Which parts of what is reserved a node shows: held to a naive reference, for the node and for whoever listens to it."""

from collections.abc import Iterator
from random import Random

import pytest
from faults_support import THOROUGH
from reservation_support import GPU, NIC
from shown_support import some_reservations, some_state

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.events import ContainerUsage
from topoalign.core.model.ids import CPU, AllocationID, ContainerName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reserved_parts import ReservedPart, reported_parts

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
