"""How GPUs are divided: all that is offered of a healthy GPU is held by somebody or left, in whatever way it is offered."""

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from decision_support import NODE, node
from slot_support import MIB, in_slots
from slot_support import holding as slots_held
from unit_support import CORES, DGX, MEMORY, holds, in_units

from topoalign.core.model.allocations import Allocation, Owner, Role
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.ids import (
    GPU,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    PodName,
    ResourceName,
)
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, Offer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import GpuPartitioning, Parts, partitioning_by_gpu

BLOCKS = 160
"""Of a GPU of the machine."""
ALL_UNITS = Parts(cores=100, memory=BLOCKS * MEMORY_BLOCK)
GPU0 = DGX.gpus[0].id


def units(gpu: DeviceID, cores: Sequence[int], blocks: Sequence[int]) -> dict[ResourceName, tuple[DeviceID, ...]]:
    found = {
        CORES: tuple(DeviceID(f"{gpu}::c{n}") for n in cores),
        MEMORY: tuple(DeviceID(f"{gpu}::m{n}") for n in blocks),
    }
    return {name: some for name, some in found.items() if some}


def offering(*offers: Offer, mig: tuple[MigDevice, ...] | None = None) -> Topology:
    first = msgspec.structs.replace(DGX.gpus[0], mig=mig)
    return msgspec.structs.replace(DGX, gpus=(first, *DGX.gpus[1:]), offers=offers)


def of_first(state: NodeState) -> GpuPartitioning:
    return partitioning_by_gpu(state)[GPU0]


@pytest.mark.parametrize("seed", range(5))
def test_units_are_held_or_left(seed: int) -> None:
    """Until all computing time or all memory is held: then nothing is left."""
    chance, state = Random(seed), node(in_units(DGX))
    expected = {gpu.id: [100, BLOCKS] for gpu in DGX.gpus}
    names: dict[DeviceID, list[str]] = {gpu.id: [] for gpu in DGX.gpus}
    for number in range(40):
        gpu = chance.choice(DGX.gpus).id
        left = expected[gpu]
        cores, blocks = chance.randint(0, min(left[0], 40)), chance.randint(0, min(left[1], 60))
        if not (cores or blocks) or 0 in left:
            continue
        devices = units(
            gpu, range(100 - left[0], 100 - left[0] + cores), range(BLOCKS - left[1], BLOCKS - left[1] + blocks)
        )
        state = holds(state, f"pod-{number}", devices)
        expected[gpu] = [left[0] - cores, left[1] - blocks]
        names[gpu].append(f"pod-{number}")

    for gpu, found in partitioning_by_gpu(state).items():
        cores, blocks = expected[gpu]
        assert (("units",), ALL_UNITS) == (found.ways, found.offered)
        assert (Parts(cores=cores, memory=blocks * MEMORY_BLOCK) if cores and blocks else Parts()) == found.left
        assert names[gpu] == [each.owner.pod for each in found.held if each.owner is not None]
        assert (100 - cores, (BLOCKS - blocks) * MEMORY_BLOCK) == (
            sum(each.parts.cores for each in found.held),
            sum(each.parts.memory for each in found.held),
        )


def test_both_halves_of_a_container_are_one_holder() -> None:
    """A kubelet is granted one after the other. Where the container is not known each stands alone."""
    state = node(in_units(DGX))
    for name, devices in (("a", units(GPU0, range(20), ())), ("b", units(GPU0, (), range(4)))):
        state = holds(state, name, devices)
    owner = state.allocations[AllocationID("a")].owner
    both = {name: msgspec.structs.replace(each, owner=owner) for name, each in state.allocations.items()}
    one = of_first(msgspec.structs.replace(state, allocations=both))
    nobody = {name: msgspec.structs.replace(each, owner=None) for name, each in state.allocations.items()}
    two = of_first(msgspec.structs.replace(state, allocations=nobody))

    assert [Parts(cores=20, memory=4 * MEMORY_BLOCK)] == [each.parts for each in one.held]
    assert [("a", None), ("b", None)] == [(each.allocation, each.owner) for each in two.held]


def test_time_slices_and_shares_by_mps_are_counted() -> None:
    for sharing, way in (("time-slicing", "time slices"), ("mps", "MPS")):
        offer = Offer(resource=GPU, devices=(GPU0,), replicas=10, sharing=sharing)  # type: ignore[arg-type]  # a literal
        state = holds(node(offering(offer)), "one", {GPU: (DeviceID(f"{GPU0}::1"), DeviceID(f"{GPU0}::7"))})
        found = of_first(state)

        assert ((way,), Parts(slices=10), Parts(slices=8)) == (found.ways, found.offered, found.left)
        assert [Parts(slices=2)] == [each.parts for each in found.held]
        assert not found.is_whole


def test_slots_are_held_with_amounts() -> None:
    """A slot of which no amount is recorded is an equal part; of a GPU whose cores are all held nothing is left."""
    state = slots_held(node(in_slots(DGX)), (0, 30, 8000), 0, (1, 100, 40960))
    found = partitioning_by_gpu(state)
    first, second = found[GPU0], found[DGX.gpus[1].id]

    assert (("slots",), Parts(slots=10, cores=100, memory=40960 * MIB)) == (first.ways, first.offered)
    assert [Parts(slots=1, cores=30, memory=8000 * MIB), Parts(slots=1, cores=10, memory=4096 * MIB)] == [
        each.parts for each in first.held
    ]
    assert Parts(slots=8, cores=60, memory=28864 * MIB) == first.left
    assert Parts() == second.left
    assert Parts() == of_first(node(in_slots(DGX), unhealthy=[GPU0])).left


def test_instances_are_named_by_their_profiles() -> None:
    mig = tuple(
        MigDevice(uuid=DeviceID(f"MIG-{n}"), profile=profile, gpu_instance=n, compute_instance=0, memory=1)
        for n, profile in enumerate(("3g.20gb", "2g.10gb", "1g.5gb"))
    )
    offers = (Offer(resource=GPU, devices=tuple(each.uuid for each in mig)),)
    state = holds(node(offering(*offers, mig=mig)), "one", {GPU: (DeviceID("MIG-1"),)})
    found = of_first(state)

    assert (("MIG",), ("3g.20gb", "1g.5gb")) == (found.ways, found.left.instances)
    assert [("2g.10gb",)] == [each.parts.instances for each in found.held]


def test_whole_gpus_are_held_or_left_whole() -> None:
    found = partitioning_by_gpu(holds(node(DGX), "one", {GPU: (GPU0,)}))

    assert all(each.is_whole for each in found.values())
    assert (Parts(), [Parts(whole=True)]) == (found[GPU0].left, [each.parts for each in found[GPU0].held])
    assert Parts(whole=True) == found[DGX.gpus[1].id].left


def test_nothing_is_left_of_a_gpu_that_is_ill_or_held_in_a_former_way() -> None:
    ill = of_first(node(in_units(DGX), unhealthy=[GPU0]))
    former = of_first(holds(node(in_units(DGX)), "whole", {GPU: (GPU0,)}))
    excluded = of_first(node(offering(Offer(resource=GPU, devices=(DGX.gpus[1].id,)))))

    assert (Parts(), ALL_UNITS) == (ill.left, ill.offered)
    assert (Parts(), [Parts(whole=True)], False) == (former.left, [each.parts for each in former.held], former.is_whole)
    assert ((), Parts(), Parts()) == (excluded.ways, excluded.offered, excluded.left)


def test_an_instance_that_is_gone_is_of_the_gpu_that_it_was_of() -> None:
    """Its container keeps the GPU's device node."""
    gone = Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("MIG-9"),)}, parents={DeviceID("MIG-9"): GPU0})
    state = node(DGX)
    state = state.apply(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=gone))

    assert [("MIG-9",)] == [each.parts.instances for each in of_first(state).held]


@pytest.mark.parametrize("seed", range(5))
def test_what_containers_have_alone_adds_up_to_what_is_held(seed: int) -> None:
    """Of units that an init container leaves to later ones, too: each unit counts once."""
    chance, state = Random(seed), node(in_units(DGX))
    held = set[DeviceID]()
    for number in range(12):
        first, last = sorted((chance.randrange(40), chance.randrange(40)))
        devices = units(GPU0, range(first, last + 1), range(first, last + 1))
        held.update(*devices.values())
        owner = Owner(namespace=Namespace("default"), pod=PodName("pod"), container=ContainerName(f"c-{number}"))
        role: Role = "init" if number < 11 else "app"
        given = Allocation(id=AllocationID(f"a-{number}"), owner=owner, role=role, devices=devices)
        state = state.apply(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=given))
    found = of_first(state)
    cores = sum("::c" in each for each in held)
    assert (cores, cores * MEMORY_BLOCK) == (
        sum(each.alone.cores for each in found.held),
        sum(each.alone.memory for each in found.held),
    )
    assert found.held[-1].parts == found.held[-1].alone
    assert cores < sum(each.parts.cores for each in found.held)
    assert ALL_UNITS.cores - cores == found.left.cores
