"""Who holds what, what is left and what overlaps, against a reference that lists every device, part and card."""

from typing import NamedTuple

import msgspec
from decision_support import NODE, machine, node
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.events import Allocation, AllocationsSnapshot
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.model import MigDevice, Topology, VirtualFunction
from topoalign.core.model.topology.offers import Offer
from topoalign.core.model.topology.validate import validate
from topoalign.core.state.fold import NodeState

SHARED, SLICE, FUNCTION = map(ResourceName, ("nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/vf"))
SHARES = 2
PLAIN = machine(gpus=(0, 0, 1), nics=(0, 1))
CUT, SRIOV = DeviceID("GPU-2"), DeviceID("mlx5_1")
INSTANCES = (DeviceID("MIG-0"), DeviceID("MIG-1"))
FUNCTIONS = (DeviceID("0000:99:00.1"), DeviceID("0000:99:00.2"))
GONE = DeviceID("MIG-9")
"""An instance that GPU-2 had once, as the record still says."""

PARENT: dict[str, str] = {
    **dict.fromkeys((*INSTANCES, GONE), CUT),
    **dict.fromkeys(FUNCTIONS, SRIOV),
    **{f"GPU-{i}::{n}": f"GPU-{i}" for i in range(3) for n in range(SHARES + 1)},
    **{f"{mig}::{n}": mig for mig in (*INSTANCES, GONE) for n in range(SHARES)},
}
"""Each part -> what it is a part of."""
THINGS = [DeviceID(name) for name in sorted({*PARENT, *PARENT.values(), "mlx5_0"})]


class Case(NamedTuple):
    """A node's hardware and who holds what, oldest first."""

    topology: Topology
    allocations: tuple[Allocation, ...]

    @property
    def state(self) -> NodeState:
        return node(self.topology).apply(
            AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=self.allocations, digest="")
        )


def cut() -> Topology:
    """GPU 2 has two MIG instances, NIC 1 two virtual functions."""
    instances = tuple(
        MigDevice(uuid=uuid, profile="1g.10gb", gpu_instance=i, compute_instance=0, memory=10 << 30)
        for i, uuid in enumerate(INSTANCES)
    )
    functions = tuple(VirtualFunction(pci=pci) for pci in FUNCTIONS)
    gpus = (*PLAIN.gpus[:2], msgspec.structs.replace(PLAIN.gpus[2], mig=instances))
    nics = (PLAIN.nics[0], msgspec.structs.replace(PLAIN.nics[1], virtual_functions=functions))
    return msgspec.structs.replace(PLAIN, gpus=gpus, nics=nics)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    offers: list[Offer] = [Offer(resource=NIC, devices=(DeviceID("mlx5_0"),))]
    for gpu in PLAIN.gpu_by_id:
        ways = [Offer(resource=GPU, devices=(gpu,)), Offer(resource=SHARED, devices=(gpu,), replicas=SHARES)]
        if gpu == CUT:
            ways += [Offer(resource=SLICE, devices=INSTANCES, replicas=replicas) for replicas in (1, SHARES)]
        offers += draw(st.sampled_from([[way] for way in ways] + [[]]))
    whole, functions = Offer(resource=NIC, devices=(SRIOV,)), Offer(resource=FUNCTION, devices=FUNCTIONS)
    offers.append(draw(st.sampled_from([whole, functions])))
    topology = msgspec.structs.replace(cut(), offers=tuple(offers))
    validate(topology)
    allocations = []
    for number in range(draw(st.integers(0, 4))):
        name = AllocationID(f"a{draw(st.integers(0, 9))}-{number}")
        if draw(st.booleans()):
            resource = draw(st.sampled_from([GPU, SHARED, SLICE, NIC, FUNCTION]))
            devices = draw(st.lists(st.sampled_from(THINGS), min_size=1, max_size=3, unique=True))
            cards = {GONE: CUT} if any(device.startswith(GONE) for device in devices) else {}
            cards |= dict.fromkeys(INSTANCES, CUT) if draw(st.booleans()) else {}
            allocations.append(Allocation(id=name, devices={resource: tuple(devices)}, cards=cards))
        else:
            addresses = draw(st.lists(st.sampled_from(FUNCTIONS), min_size=1, unique=True))
            held = {SRIOV: tuple(map(str, addresses))}
            allocations.append(Allocation(id=name, devices={NIC: (SRIOV,)}, virtual_functions=held))
    return Case(topology, tuple(allocations))


def above(case: Case, thing: str) -> set[str]:
    """The thing, what it is a part of, and what that is a part of, as far as the node's hardware and record tell."""
    if thing not in PARENT or (thing == GONE and not any(GONE in held.cards for held in case.allocations)):
        return {thing}
    return {thing} | above(case, PARENT[thing])


def touch(case: Case, one: str, other: str) -> bool:
    return one in above(case, other) or other in above(case, one)


def things_of(held: Allocation) -> set[str]:
    """What it has to itself: of a NIC of which it has functions, these."""
    functions = {address for addresses in held.virtual_functions.values() for address in addresses}
    return {device for ids in held.devices.values() for device in ids} - held.virtual_functions.keys() | functions


def newest(case: Case, thing: str) -> str | None:
    """Of those that have the same thing, the one that was granted last: the others have ended, or are displaced."""
    return next((held.id for held in reversed(case.allocations) if thing in things_of(held)), None)


def blocked(case: Case) -> set[str]:
    """What is offered and touches something that was given under another resource, or in another way."""
    offered = {base: offer for offer in case.topology.offered for base in offer.devices}
    found: set[str] = set()
    for held in case.allocations:
        for resource, devices in held.devices.items():
            for device in {*devices} - held.virtual_functions.keys():
                offer = offered.get(DeviceID(device.split("::")[0]))
                if offer is None or offer.resource != resource or (offer.replicas > 1) != ("::" in device):
                    found |= {base for base in offered if touch(case, base, device)}
    return found


@given(cases(), st.lists(st.sampled_from(THINGS), max_size=3, unique=True))
def test_what_overlaps_is_the_same_thing_a_part_or_a_whole(case: Case, asked: list[DeviceID]) -> None:
    expected = {newest(case, thing) for thing in THINGS for each in asked if touch(case, thing, each)} - {None}

    ownership = case.state.ownership

    assert sorted(map(str, expected)) == ownership.overlapping(map(ownership.holding, asked))
    assert [bool({newest(case, thing) for thing in THINGS if touch(case, thing, each)} - {None}) for each in asked] == [
        ownership.is_held(each) for each in asked
    ]


@given(cases())
def test_what_is_held_under_a_former_offer_blocks_what_it_touches(case: Case) -> None:
    assert blocked(case) == case.state.ownership.blocked


@given(cases())
def test_free_is_what_is_offered_healthy_not_blocked_and_not_held(case: Case) -> None:
    """All devices of these nodes are healthy."""
    held = {device for each in case.allocations for devices in each.devices.values() for device in devices}
    ownership = case.state.ownership

    for resource, listed in case.topology.devices.items():
        expected = [d for d in listed if d not in held and d.split("::")[0] not in blocked(case)]
        assert expected == list(ownership.free(resource))
    assert held == ownership.holders.keys()
    for device, name in ownership.holders.items():
        assert name == next(each.id for each in reversed(case.allocations) if device in each.device_ids)


@given(cases(), st.sampled_from(["GPU-0", CUT, SRIOV]))
def test_what_is_left_of_a_card_is_offered_and_touches_nothing_held(case: Case, card: str) -> None:
    held = {thing for each in case.allocations for thing in things_of(each)}
    offered = [device for listed in case.topology.devices.values() for device in listed]
    of_card = [device for device in offered if card in above(case, device)]

    expected = [device for device in of_card if not any(touch(case, device, thing) for thing in held)]

    assert expected == [holding.id for holding in case.state.ownership.left(DeviceID(card))]


@given(cases())
def test_held_whole_and_functions_in_use_are_read_from_all_fields(case: Case) -> None:
    held = {thing for each in case.allocations for thing in things_of(each)}

    assert {*map(str, FUNCTIONS)} & held == case.state.ownership.functions_in_use
    assert {thing for thing in held if thing not in PARENT} == case.state.ownership.held_whole


@given(cases(), st.lists(st.sampled_from(THINGS), max_size=3), st.sampled_from(THINGS))
def test_a_set_of_ids_overlaps_what_touches_one_of_them(case: Case, asked: list[DeviceID], other: DeviceID) -> None:
    ownership = case.state.ownership

    found = ownership.set_of(asked).overlaps(ownership.holding(other))

    assert any(touch(case, other, each) for each in asked) is found


def test_the_card_of_a_part_is_told_without_the_number_of_a_share() -> None:
    """What is no part, or of a card that is not known, is left out."""
    ownership = node(cut()).ownership
    asked = map(DeviceID, ("GPU-0", "GPU-0::1", "MIG-0", "MIG-1::7", "MIG-9", FUNCTIONS[0]))

    assert {"MIG-0": CUT, "MIG-1": CUT, FUNCTIONS[0]: SRIOV} == ownership.cards_of(asked)


def test_cpus_in_use_are_those_of_all_allocations() -> None:
    live = tuple(Allocation(id=AllocationID(f"a{i}"), cpus=cpus) for i, cpus in enumerate(("", "0-2", "2,5")))

    assert frozenset({0, 1, 2, 5}) == Case(PLAIN, live).state.ownership.cpus_in_use
    assert frozenset() == Case(PLAIN, ()).state.ownership.cpus_in_use


def test_an_instance_that_is_held_as_it_is_offered_blocks_nothing() -> None:
    """The record says which card it is a part of. Offered in shares of time it waits until the instance is released."""
    held = Allocation(id=AllocationID("a"), devices={SLICE: INSTANCES[:1]}, cards={INSTANCES[0]: CUT})
    whole, shared = (
        msgspec.structs.replace(cut(), offers=(Offer(resource=SLICE, devices=INSTANCES, replicas=replicas),))
        for replicas in (1, SHARES)
    )

    assert frozenset() == Case(whole, (held,)).state.ownership.blocked
    assert {INSTANCES[0]} == Case(shared, (held,)).state.ownership.blocked
