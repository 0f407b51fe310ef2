"""
Who holds what, what is left and what overlaps, against a reference that lists every device, part and card: as computed from
all allocations, and as it follows each fact.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import pytest
from decision_support import NODE, machine, node
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealth,
    Event,
    HealthState,
    Owner,
)
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import GPU, NIC, AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet, OfferedDevices
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology, VirtualFunction
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState
from topoalign.core.state.holders import Held, Holders
from topoalign.core.state.ownership import Ownership

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
            allocations.append(Allocation(id=name, devices={resource: tuple(devices)}, parents=cards))
        else:
            addresses = draw(st.lists(st.sampled_from(FUNCTIONS), min_size=1, unique=True))
            held = {SRIOV: tuple(map(str, addresses))}
            allocations.append(Allocation(id=name, devices={NIC: (SRIOV,)}, virtual_functions=held))
    return Case(topology, tuple(allocations))


OWNER = Owner(namespace=Namespace("a"), pod=PodName("b"), container=ContainerName("c"))
GPU_0 = DeviceID("GPU-0")
HEALTHS = [DeviceHealth(state=state) for state in (HealthState.HEALTHY, HealthState.UNHEALTHY)]


class Answers(NamedTuple):
    """All that an ownership can be asked."""

    overlapping: list[object]
    blocked: object
    unlisted: object
    free: object
    former_resources: object
    health: object
    others: object


def answers_of(state: NodeState, owned: Ownership) -> Answers:
    resources = sorted(state.hardware.devices)
    held = sorted({resource for each in state.allocations.values() for resource in each.devices})
    return Answers(
        [(owned.overlapping([owned.holding(thing)]), owned.is_held(thing)) for thing in THINGS],
        owned.blocked,
        [owned.unlisted(resource) for resource in sorted({*resources, *held})],
        [(owned.free(resource), owned.held(resource), owned.usable(resource)) for resource in resources],
        owned.former_resources,
        [owned.handed_out.health_of(thing) for thing in THINGS],
        (owned.held_whole, owned.functions_in_use, owned.cpus_in_use),
    )


def fresh(state: NodeState) -> Ownership:
    return Ownership(state.hardware, state.allocations, state.reported_health, state.ended)


@st.composite
def histories(draw: st.DrawFn) -> list[NodeState]:
    """States of a node, each of them asked for its ownership before the next fact, or not."""
    first, other = draw(cases()), draw(cases())
    states = [first.state]
    granted = [*first.allocations, *other.allocations]
    for _ in range(draw(st.integers(1, 8))):
        state = states[-1]
        if draw(st.booleans()):
            answers_of(state, state.ownership)
        live = sorted(state.allocations)
        place: Any = {"node": NODE, "epoch": state.epoch, "seq": state.seq + 1}
        kind = draw(st.sampled_from(["grant", "grant", "release", "bind", "health", "topology", "snapshot"]))
        event: Event | None = None
        if kind == "grant" and granted:
            event = AllocationGranted(allocation=draw(st.sampled_from(granted)), **place)
        elif kind == "release" and live:
            event = AllocationReleased(allocation=draw(st.sampled_from(live)), reason="gone", **place)
        elif kind == "bind" and live:
            event = AllocationBound(allocation=draw(st.sampled_from(live)), owner=OWNER, **place)
        elif kind == "health" and state.health is not None:
            reported_health = draw(st.dictionaries(st.sampled_from(THINGS), st.sampled_from(HEALTHS), max_size=4))
            event = msgspec.structs.replace(state.health, revision=state.health.revision + 1, devices=reported_health)
        elif kind == "topology" and state.topology is not None:
            hardware = draw(st.sampled_from([first.topology, other.topology]))
            event = msgspec.structs.replace(state.topology, revision=state.topology.revision + 1, topology=hardware)
        elif kind == "snapshot":
            some = tuple(draw(st.lists(st.sampled_from(granted), unique_by=lambda each: each.id))) if granted else ()
            event = AllocationsSnapshot(allocations=some, digest="", **place)
        states += [state.apply(event)] if event is not None else []
    return states


@given(histories())
def test_following_facts_equals_computing_anew(states: list[NodeState]) -> None:
    """Also of the former states: what follows them leaves them as they were."""
    for state in states:
        assert answers_of(state, fresh(state)) == answers_of(state, state.ownership)


@given(cases())
def test_a_resource_that_is_held_and_not_offered_is_a_former_one(case: Case) -> None:
    held = {resource for each in case.allocations for resource in each.devices}
    offered = case.topology.offers_of.keys()

    assert held | offered == case.state.ownership.former_resources | offered


@given(cases(), cases())
def test_a_decision_under_way_sees_what_it_gives(one: Case, other: Case) -> None:
    """`holding` and `without`, by which decisions look ahead, equal computing anew, too."""
    state = one.state
    for held in other.allocations:
        state.ownership.is_held(THINGS[0])
        ahead = state.holding(held)
        back = ahead.without(held.id)
        for each in (ahead, back, state):
            assert answers_of(each, fresh(each)) == answers_of(each, each.ownership)


def test_a_thousand_grants_and_releases_make_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each of them reads the one allocation that it is about, whatever is held besides."""
    made, read = [], []
    init, read_one = Holders.__init__, Holders._read

    def counted_init(self: Holders, *given: Any) -> None:
        made.append(self)
        init(self, *given)

    def counted_read(self: Holders, held: Allocation) -> Held:
        read.append(held.id)
        return read_one(self, held)

    monkeypatch.setattr(Holders, "__init__", counted_init)
    monkeypatch.setattr(Holders, "_read", counted_read)
    shared = msgspec.structs.replace(PLAIN, offers=(Offer(resource=SHARED, devices=(GPU_0,), replicas=2_000),))
    state = Case(shared, ()).state
    shares = [Allocation(id=AllocationID(f"a{n}"), devices={SHARED: (DeviceID(f"GPU-0::{n}"),)}) for n in range(1_000)]
    for number, share in enumerate(shares):
        assert not state.ownership.is_held(share.devices[SHARED][0])
        assert state.health_of(GPU_0).usable
        state = state.apply(AllocationGranted(node=NODE, epoch=9, seq=number + 2, allocation=share))
    for number, share in enumerate(shares):
        assert [share.id] == state.ownership.overlapping([state.ownership.holding(share.devices[SHARED][0])])
        fact = AllocationReleased(node=NODE, epoch=9, seq=number + 1_002, allocation=share.id, reason="gone")
        state = state.apply(fact)

    assert not state.ownership.is_held(DeviceID("GPU-0::0"))
    assert 1 == len(made)
    assert [each.id for each in (*shares, *shares)] == read


def test_a_grant_is_followed_when_somebody_asks_or_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller of Allocate waits for no index, and a state that nobody asks keeps no more than the one before it."""
    read: list[AllocationID] = []
    read_one = Holders._read

    def counted_read(self: Holders, held: Allocation) -> Held:
        read.append(held.id)
        return read_one(self, held)

    monkeypatch.setattr(Holders, "_read", counted_read)
    shared = msgspec.structs.replace(PLAIN, offers=(Offer(resource=SHARED, devices=(GPU_0,), replicas=2_000),))
    state = Case(shared, ()).state
    assert not state.ownership.is_held(GPU_0)
    names = [AllocationID(f"a{number}") for number in range(4)]
    for number, name in enumerate(names):
        share = Allocation(id=name, devices={SHARED: (DeviceID(f"GPU-0::{number}"),)})
        state = state.apply(AllocationGranted(node=NODE, epoch=9, seq=number + 2, allocation=share))
        assert names[:number] == read
    assert state.ownership.is_held(DeviceID("GPU-0::3"))
    assert names == read


@given(st.permutations(range(3)))
def test_a_device_is_held_until_its_last_holder_is_gone(order: list[int]) -> None:
    state = Case(PLAIN, ()).state
    held = [Allocation(id=AllocationID(f"a{n}"), devices={GPU: (GPU_0,)}) for n in range(3)]
    free = len(state.ownership.free(GPU))
    for each in held:
        state = state.holding(each)
    for number in order:
        assert (True, free - 1) == (GPU_0 in state.ownership.held(GPU), len(state.ownership.free(GPU)))
        state = state.without(held[number].id)

    assert (False, free) == (GPU_0 in state.ownership.held(GPU), len(state.ownership.free(GPU)))


NAMES = [DeviceID(name) for name in ("a", "b", "b::0", "b::1", "c::1", "c::10", "c::", "d::x", "e")]
OTHERS = [DeviceID(name) for name in ("", "a::0", "x", "c")]

listings = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([None, (), (0,), (1,), (0, 1), (-1,)])),
    unique_by=lambda each: each[0],
)
some = st.sets(st.sampled_from([*NAMES, *OTHERS]))


def in_order(listed: Iterable[DeviceID], ids: Iterable[DeviceID]) -> list[DeviceID]:
    wanted = {*ids}
    return [device for device in listed if device in wanted]


@given(listings, some, some, st.integers(-1, 10))
def test_sets_of_devices_are_the_sets_of_their_ids(
    listed: list[tuple[DeviceID, tuple[int, ...] | None]], one: set[DeviceID], other: set[DeviceID], amount: int
) -> None:
    """In the hardware's order, and without what is not listed."""
    devices = OfferedDevices(listed)
    mine, theirs = devices.some(one), devices.some([*other, *other])

    assert in_order(devices, one) == [*mine]
    assert in_order(devices, one & other) == [*(mine & theirs)]
    assert in_order(devices, one | other) == [*(mine | theirs)]
    assert in_order(devices, one - other) == [*(mine - theirs)]
    assert in_order(devices, one)[: max(0, amount)] == [*mine.first(amount)]
    assert len(in_order(devices, one)) == len(mine)
    assert [device in one and device in devices for device in (*NAMES, *OTHERS)] == [
        device in mine for device in (*NAMES, *OTHERS)
    ]
    assert (in_order(devices, one) == in_order(devices, other)) == (mine == theirs)
    assert [*devices] == [*devices.everything] == [*devices.ids]
    assert {base_of(device) for device in mine} == {*mine.bases}
    assert [base for base in devices.by_base if base in mine.bases] == mine.bases
    if mine:
        assert in_order(devices, one)[0] == mine.lowest


@given(listings, st.lists(st.sampled_from([*NAMES, *OTHERS])))
def test_ids_are_a_set_where_all_are_listed_and_named_once(
    listed: list[tuple[DeviceID, tuple[int, ...] | None]], ids: list[DeviceID]
) -> None:
    devices = OfferedDevices(listed)
    found = devices.listed(ids)

    if len({*ids}) == len(ids) and {*ids} <= {*devices}:
        assert isinstance(found, DeviceSet)
        assert in_order(devices, ids) == [*found]
    else:
        assert found is ids


@given(listings)
def test_devices_are_grouped_by_what_they_have_in_common(
    listed: list[tuple[DeviceID, tuple[int, ...] | None]],
) -> None:
    devices = OfferedDevices(listed)

    for groups, key in ((devices.by_nodes, devices.get), (devices.by_base, lambda device: device.split("::")[0])):
        assert {key(device): [each for each in devices if key(each) == key(device)] for device in devices} == {
            name: [*group] for name, group in groups.items()
        }
        assert [*dict.fromkeys(map(key, devices))] == [*groups]


def test_a_set_of_nothing_is_empty_and_iterates_over_nothing() -> None:
    assert (0, [], NO_DEVICES.everything) == (
        len(NO_DEVICES.some(NAMES)),
        [*NO_DEVICES.some(NAMES)],
        DeviceSet(OfferedDevices(), 0),
    )


@given(cases())
def test_held_and_free_devices_are_those_found_one_by_one(case: Case) -> None:
    """A device is held under its id whichever resource it was given for; free are the usable that are not held."""
    state = case.state
    owned = state.ownership
    held = {device for each in case.allocations for devices in each.devices.values() for device in devices}
    for resource, listed in state.hardware.devices.items():
        usable = [d for d in listed if state.health_of(d).usable and d.split("::")[0] not in owned.co_allocated]

        assert in_order(listed, held) == [*owned.held(resource)]
        assert usable == [*owned.usable(resource)]
        assert [device for device in usable if device not in held] == [*owned.free(resource)]
    nobody = ResourceName("example.com/none")
    assert [0, 0, 0] == [len(owned.held(nobody)), len(owned.usable(nobody)), len(owned.free(nobody))]


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
