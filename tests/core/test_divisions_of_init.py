"""What containers have of a GPU alone adds up, also where an init container leaves a slot to later ones."""

from random import Random

import pytest
from decision_support import NODE, node
from slot_support import MIB, in_slots, slot
from unit_support import DGX

from topoalign.core.model.allocations import Allocation, Owner, Role
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, Namespace, PodName
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import GpuPartitioning, Parts, partitioning_by_gpu

GIB = 1024 * MIB


def given(state: NodeState, container: str, number: int, cores: int, memory: int, role: Role = "init") -> NodeState:
    """The node after a container of the one pod got slot `number` of the first GPU with this amount; `memory`: MiB."""
    device = slot(0, number, state)
    allocation = Allocation(
        id=AllocationID(f"a-{len(state.allocations)}"),
        owner=Owner(namespace=Namespace("ml"), pod=PodName("train"), container=ContainerName(container)),
        role=role,
        devices={GPU: (device,)},
        slots={device: Amount(cores=cores, memory=memory * MIB)},
    )
    return state.apply(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=allocation))


def of_first(state: NodeState) -> GpuPartitioning:
    return partitioning_by_gpu(state)[DGX.gpus[0].id]


def test_a_slot_of_two_containers_counts_for_the_newest_at_its_largest() -> None:
    """60 cores and then 30, 10 GiB and then 20."""
    state = given(node(in_slots(DGX)), "prepare", 3, 60, 10240)
    found = of_first(given(state, "main", 3, 30, 20480, "app"))

    assert [Parts(), Parts(slots=1, cores=60, memory=20 * GIB)] == [each.alone for each in found.held]
    assert [True, False] == [each.is_left for each in found.held]
    assert Parts(slots=9, cores=40, memory=20 * GIB) == found.left


def test_a_slot_that_a_container_has_by_two_records_is_one() -> None:
    state = given(node(in_slots(DGX)), "main", 3, 30, 10240, "app")
    (found,) = of_first(given(state, "main", 3, 60, 1024, "app")).held

    assert Parts(slots=1, cores=60, memory=10 * GIB) == found.parts == found.alone
    assert not found.is_left


@pytest.mark.parametrize("seed", range(20))
def test_slots_that_containers_have_alone_and_what_is_left_are_the_gpu(seed: int) -> None:
    """Whatever amounts they have by three slots, one after the other; nobody has more of it alone than in all."""
    chance, state = Random(seed), node(in_slots(DGX))
    for _ in range(chance.randint(1, 12)):
        name, cores, memory = f"c-{chance.randrange(4)}", chance.randint(0, 33), chance.randint(0, 13000)
        state = given(state, name, chance.randrange(3), cores, memory)
    found = of_first(state)
    shown = [*(each.alone for each in found.held), found.left]

    assert found.offered == Parts(
        slots=sum(each.slots for each in shown),
        cores=sum(each.cores for each in shown),
        memory=sum(each.memory for each in shown),
    )
    for each in found.held:
        assert all(alone <= part for alone, part in zip(each.alone[3:], each.parts[3:], strict=True))
