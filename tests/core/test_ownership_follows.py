"""The ownership that follows each fact equals the one that is computed anew from all allocations."""

from typing import Any, NamedTuple

import msgspec
import pytest
from decision_support import NODE
from hypothesis import given
from hypothesis import strategies as st
from ownership_support import PLAIN, SHARED, THINGS, Case, cases

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
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.state.fold import NodeState
from topoalign.core.state.holders import Held, Holders
from topoalign.core.state.ownership import Ownership

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
