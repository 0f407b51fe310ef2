"""Pods that wait with slots while a kubelet gives what is reserved for them to others that wait."""

from random import Random

import msgspec
from decision_support import node
from fact_support import allocated, changed, reservation, reserved_container
from hypothesis import given
from hypothesis import strategies as st
from slot_support import MIB, in_slots
from unit_support import DGX

from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.reservations import Reservation
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations

Asked = dict[DeviceID, Amount]
"""Slot that is reserved -> what the pod asked for by it."""


def waits(pod: str, asked: Asked) -> Reservation:
    return reservation(pod, msgspec.structs.replace(reserved_container(*asked), slots=asked))


def gets(state: NodeState, pod: str, slots: list[DeviceID]) -> NodeState:
    granted = allocated(*slots, pod=pod, number=state.seq + 1)
    return state.apply(AllocationGranted(node=state.node, epoch=state.epoch, seq=state.seq + 1, allocation=granted))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_whatever_others_got_a_pod_waits_for_what_it_asked_for(counts: list[int], chance: Random) -> None:
    """The naive reference is what each pod asked for: so many slots, and so much by each, whoever got which."""
    state = node(in_slots(DGX))
    free = [DeviceID(f"{gpu.id}::{number}") for number in range(2) for gpu in DGX.gpus]
    pods: dict[str, Asked] = {}
    for place, count in enumerate(counts):
        amount = Amount(cores=5 * (place + 1), memory=1_000 * (place + 1) * MIB)
        pods[f"p{place}"] = {free.pop(): amount for _ in range(count)}
    kept = NodeReservations().apply(changed(*(waits(pod, asked) for pod, asked in pods.items())), 1, 0.0)
    left = [slot for asked in pods.values() for slot in asked]
    chance.shuffle(left)

    for pod in chance.sample([*pods], len(pods)):
        count = len(pods.pop(pod))
        state, left = gets(state, pod, left[:count]), left[count:]
        kept = kept.observe(state)

        held = {each.pod: each.containers[0] for each in kept.held(0.0)}
        assert {other: [*asked.values()] for other, asked in pods.items()} == {
            other: [*reserved.slots.values()] for other, reserved in held.items()
        }
        assert all(reserved.slots.keys() == {*reserved.devices[GPU]} for reserved in held.values())


def test_a_pod_waits_for_a_slot_of_the_same_gpu_where_the_other_leaves_one() -> None:
    """S17. As much of each GPU is held and reserved as before, whatever else the other one was to get, and got."""
    first, second = (each.id for each in DGX.gpus[:2])
    small, large = Amount(cores=5, memory=1_000 * MIB), Amount(cores=60, memory=4_000 * MIB)
    own = {DeviceID(f"{first}::0"): small, DeviceID(f"{second}::1"): small}
    others = DeviceID(f"{second}::0")
    said = changed(waits("a", own), waits("b", {others: large}))
    state = gets(node(in_slots(DGX)), "a", [DeviceID(f"{first}::1"), others])

    (left,) = NodeReservations().apply(said, 1, 0.0).observe(state).held(0.0)

    assert ("b", {DeviceID(f"{second}::1"): large}) == (left.pod, left.containers[0].slots)
