"""Who holds what, what is left and what overlaps, against a reference that lists every device, part and card."""

import msgspec
from decision_support import node
from hypothesis import given
from hypothesis import strategies as st
from ownership_support import (
    CUT,
    FUNCTIONS,
    GONE,
    INSTANCES,
    PARENT,
    PLAIN,
    SHARES,
    SLICE,
    SRIOV,
    THINGS,
    Case,
    cases,
    cut,
)

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.device_offers import Offer


def above(case: Case, thing: str) -> set[str]:
    """The thing, what it is a part of, and what that is a part of, as far as the node's hardware and record tell."""
    if thing not in PARENT or (thing == GONE and not any(GONE in held.parents for held in case.allocations)):
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
    """
    What is offered and touches something that was given under another resource, or in another way. A share touches what its
    card does: an instance of a card of which somebody has a time slice is blocked.
    """
    offered = {base: offer for offer in case.topology.offered for base in offer.devices}
    found: set[str] = set()
    for held in case.allocations:
        for resource, devices in held.devices.items():
            for device in {*devices} - held.virtual_functions.keys():
                offer = offered.get(DeviceID(device.split("::")[0]))
                if offer is None or offer.resource != resource or (offer.replicas > 1) != ("::" in device):
                    found |= {base for base in offered if touch(case, base, device.partition("::")[0])}
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

    assert {"MIG-0": CUT, "MIG-1": CUT, FUNCTIONS[0]: SRIOV} == ownership.parents_of(asked)


def test_cpus_in_use_are_those_of_all_allocations() -> None:
    live = tuple(Allocation(id=AllocationID(f"a{i}"), cpus=cpus) for i, cpus in enumerate(("", "0-2", "2,5")))

    assert frozenset({0, 1, 2, 5}) == Case(PLAIN, live).state.ownership.cpus_in_use
    assert frozenset() == Case(PLAIN, ()).state.ownership.cpus_in_use


def test_an_instance_that_is_held_as_it_is_offered_blocks_nothing() -> None:
    """The record says which card it is a part of. Offered in shares of time it waits until the instance is released."""
    held = Allocation(id=AllocationID("a"), devices={SLICE: INSTANCES[:1]}, parents={INSTANCES[0]: CUT})
    whole, shared = (
        msgspec.structs.replace(cut(), offers=(Offer(resource=SLICE, devices=INSTANCES, replicas=replicas),))
        for replicas in (1, SHARES)
    )

    assert frozenset() == Case(whole, (held,)).state.ownership.blocked
    assert {INSTANCES[0]} == Case(shared, (held,)).state.ownership.blocked
