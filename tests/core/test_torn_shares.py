"""The second half of a share follows the first where the kubelet tells of the pod between the two questions."""

import msgspec
import pytest
from decision_support import node
from fact_support import changed, reservation
from unit_support import CORES, DGX, KUBELET, MEMORY, in_units

from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.events import UsageObserved
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.sharing.reserved_shares import OpenHalf, ShareQuestion, reserved_units
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations

RULES = to_kubelet_rules(msgspec.structs.replace(KUBELET, cpu_manager="none", memory_manager="None"))
MAIN = ContainerName("main")
Units = dict[ResourceName, tuple[DeviceID, ...]]


def units(first: int, *gpus: int) -> Units:
    """Of each GPU 30 units of computing time and two blocks of memory, from these numbers on."""
    return {
        CORES: tuple(DeviceID(f"GPU-{gpu}::c{30 * first + number}") for gpu in gpus for number in range(30)),
        MEMORY: tuple(DeviceID(f"GPU-{gpu}::m{2 * first + number}") for gpu in gpus for number in range(2)),
    }


def waiting(pod: str, devices: Units) -> Reservation:
    return reservation(pod, ReservedContainer(container=MAIN, devices=devices))


def asked_for_memory(reserved: NodeReservations, state: NodeState, grant: Allocation) -> set[DeviceID]:
    """What the kubelet is to take after this grant of computing time."""
    every = state.hardware.devices[MEMORY]
    question = ShareQuestion(MEMORY, [*every], (), len(grant.device_ids) // 15)
    own = reserved_units(state, reserved, 0.0, question, OpenHalf(grant, is_certain=True))
    return {*own.units} if own is not None else set()


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("is_told", [False, True])
def test_the_other_half_is_on_the_gpus_of_the_first(is_told: bool, gpus: int) -> None:
    """Of three equal pods the last one comes first, and is given the computing time of the first one."""
    near, far = range(gpus), range(4, 4 + gpus)
    a, b, c = units(0, *near), units(1, *near), units(0, *far)
    grant = Allocation(id=AllocationID("grant"), devices={CORES: a[CORES]})
    state = node(in_units(DGX)).holding(grant)
    entry = CheckpointEntry(pod_uid="uid-c", container=MAIN, devices={CORES: a[CORES]})
    kubelet = KubeletObserved(rules=RULES, entries=(entry,) if is_told else ())
    state = state.apply(
        UsageObserved(node=state.node, epoch=1, revision=1, containers=(), containers_known=True, kubelet=kubelet)
    )
    reserved = NodeReservations().apply(changed(waiting("a", a), waiting("b", b), waiting("c", c)), 1, 0.0)
    reserved = reserved.observe(state, own=True)

    assert is_told is bool(reserved.swaps)
    assert {*a[MEMORY]} == asked_for_memory(reserved, state, grant)


def test_equal_parts_follow_a_grant_that_was_swapped() -> None:
    """What the second pod was to have was swapped for it, and nobody has told who has the memory of it yet."""
    a, b, c = units(0, 0, 1), units(1, 0, 1), units(0, 4, 5)
    grant = Allocation(id=AllocationID("grant"), devices={CORES: c[CORES]})
    held = Allocation(id=AllocationID("memory"), devices={MEMORY: a[MEMORY]})
    state = node(in_units(DGX)).holding(held).holding(grant)
    swapped = {CORES: c[CORES], MEMORY: a[MEMORY]}
    c |= {CORES: a[CORES]}
    reserved = NodeReservations().apply(changed(waiting("a", swapped), waiting("b", b), waiting("c", c)), 1, 0.0)

    assert {*c[MEMORY]} == asked_for_memory(reserved.observe(state, own=True), state, grant)
