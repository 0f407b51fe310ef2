"""What is reserved on a node, until the node shows it or its time is over."""

import msgspec
import pytest
from fact_support import NODE, allocated, block, changed, ids, reservation, reserved_container
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core import wire
from topoalign.core.model.allocations import Allocation, MemoryBlock, Owner
from topoalign.core.model.errors import Undecodable
from topoalign.core.model.events import ContainerUsage, UsageObserved
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import CPU, GPU, NIC, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, KubeletRules
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.ports import Stream
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import (
    NodeReservations,
    in_order_of_binds,
    reservation_of,
    reserved_allocations,
    with_reserved,
)

RULES = KubeletRules(
    policy="none", scope="container", cpu_manager="static", memory_manager="Static", placement="topology"
)


def after(*reservations: Reservation, now: float = 100.0, made: tuple[str, ...] = ()) -> NodeReservations:
    return NodeReservations().apply(changed(*reservations, made=made), 1, now)


def holding(*allocations: Allocation) -> NodeState:
    return NodeState(node=NODE, allocations={each.id: each for each in allocations})


def listing(*entries: CheckpointEntry, containers: tuple[ContainerUsage, ...] = (), unknown: str = "") -> NodeState:
    kubelet = KubeletObserved(rules=RULES, entries=entries, cpus_unknown=unknown)
    return NodeState(
        node=NODE, usage=UsageObserved(node=NODE, epoch=1, revision=1, containers=containers, kubelet=kubelet)
    )


def entry(pod: str, *, name: str = "main", cpus: str = "", memory: tuple[MemoryBlock, ...] = ()) -> CheckpointEntry:
    return CheckpointEntry(pod_uid=f"uid-{pod}", container=ContainerName(name), cpus=cpus, memory=memory)


def rest(state: NodeReservations, now: float = 100.0) -> list[tuple[ReservedContainer, ...]]:
    return [each.containers for each in state.held(now)]


def test_a_message_replaces_all_reservations_of_the_node() -> None:
    first, second = reservation("a", reserved_container("GPU-0")), reservation("b", reserved_container("GPU-1"))

    state = after(first).apply(changed(second, seq=2), 2, 101.0)

    assert ["uid-b"] == [each.pod_uid for each in state.held(101.0)]
    assert 2 == state.position


def test_a_reservation_ends_by_the_readers_own_clock() -> None:
    """Counted from receipt, to the second."""
    state = after(reservation("a", reserved_container("GPU-0"), seconds=30.0), now=100.0)

    assert [10.0] == [each.seconds_left for each in state.held(120.0)]
    assert () == state.held(130.0)
    assert (("uid-a",), ()) == (state.ended(130.0).expired, state.ended(129.9).expired)


def test_a_message_that_repeats_a_reservation_does_not_prolong_it() -> None:
    """Each reader counts from its own receipt, so every message would add the time that it was under way."""
    held = reservation("a", reserved_container("GPU-0"), seconds=30.0)
    state = after(held, now=100.0)

    repeated = state.apply(changed(held, seq=2), 2, 110.0)
    renewed = state.apply(changed(held, seq=2, made=("uid-a",)), 2, 110.0)
    shorter = state.apply(changed(msgspec.structs.replace(held, seconds_left=5.0), seq=2), 2, 110.0)

    assert [(0, 1, 0)] == [tuple(len(each.held(132.0)) for each in (repeated, renewed, shorter))]
    assert (1, 0) == (len(repeated.held(129.0)), len(shorter.held(116.0)))


def test_each_part_is_held_until_the_node_shows_it() -> None:
    state = after(reservation("a", reserved_container("GPU-0", "GPU-1", cpus="0-3", memory=(block(),))))

    state = state.observe(listing(entry("a", cpus="4-7")))
    assert [(reserved_container("GPU-0", "GPU-1", memory=(block(),)),)] == rest(state)
    state = state.observe(listing(entry("a", cpus="4-7", memory=(block(),))))
    assert [(reserved_container("GPU-0", "GPU-1"),)] == rest(state)
    assert ((), ()) == state.ended(100.0)
    state = state.observe(holding(allocated("GPU-1", "GPU-0", pod="a")))
    assert [] == rest(state)
    assert (("uid-a",), ()) == state.ended(100.0)


def test_what_was_shown_once_stays_shown() -> None:
    """The container may end at once: nothing is reserved for it any more."""
    state = after(reservation("a", reserved_container("GPU-0"))).observe(holding(allocated("GPU-0", pod="a")))

    assert [] == rest(state.observe(holding()))
    assert [] == rest(state.apply(changed(reservation("a", reserved_container("GPU-0")), seq=2), 2, 101.0), 101.0)


def test_a_pod_that_got_other_devices_holds_its_reserved_ones_no_more() -> None:
    """Known only once the allocation has its owner: until then both are held."""
    state = after(reservation("a", reserved_container("GPU-0")))

    assert [(reserved_container("GPU-0"),)] == rest(state.observe(holding(allocated("GPU-5"))))
    assert [] == rest(state.observe(holding(allocated("GPU-5", pod="a"))))


@pytest.mark.parametrize("pod", ["", "b"])
def test_an_allocation_of_another_pod_shows_nothing(pod: str) -> None:
    """What is known of a node lags: the allocation may be that of a pod which had the device before the reservation."""
    state = after(reservation("a", reserved_container("GPU-0"))).observe(holding(allocated("GPU-0", pod=pod)))

    assert [(reserved_container("GPU-0"),)] == rest(state)


def test_a_node_knows_from_its_own_record_what_it_gave() -> None:
    """That is never behind, and does not know the owner yet."""
    state = after(reservation("a", reserved_container("GPU-0", "GPU-1"))).observe(holding(allocated("GPU-0")), own=True)

    assert [(reserved_container("GPU-1"),)] == rest(state)


def test_pods_that_got_what_was_reserved_for_one_another_have_swapped() -> None:
    """A kubelet cannot tell equal pods apart: what the first one left is now reserved for the second one."""
    both = (
        reservation("a", reserved_container("GPU-0", "GPU-1")),
        reservation("b", reserved_container("GPU-2", "GPU-3")),
    )
    state = after(*both).observe(holding(allocated("GPU-2", "GPU-1", pod="a")))

    assert ["b"] == [each.pod for each in state.held(100.0)]
    assert [{"GPU-0", "GPU-3"}] == [{*each.containers[0].devices[GPU]} for each in state.held(100.0)]
    repeated = state.apply(changed(*both, seq=2), 2, 101.0)
    assert [{"GPU-0", "GPU-3"}] == [{*each.containers[0].devices[GPU]} for each in repeated.held(101.0)]
    anew = state.apply(changed(*both, seq=2, made=("uid-b",)), 2, 101.0)
    assert [{"GPU-2", "GPU-3"}] == [{*each.containers[0].devices[GPU]} for each in anew.held(101.0)]
    assert ("uid-a", "uid-b") == state.observe(holding(allocated("GPU-3", "GPU-0", pod="b"))).ended(100.0).consumed


def test_a_pod_does_not_swap_with_itself() -> None:
    """A container has what was reserved for another one of its pod: that is held once, and what it left is nobody's."""
    pod = reservation("a", reserved_container("GPU-0", name="one"), reserved_container("GPU-1", name="two"))
    facts = holding(allocated("GPU-1", pod="a", name="one"))
    state = after(pod).observe(facts)

    assert ((), [(reserved_container("GPU-1", name="two"),)]) == (state.swaps, rest(state))
    held = with_reserved(facts, facts, state.held(100.0)).allocations.values()
    assert ["GPU-1"] == [device for each in held for device in each.device_ids]


def test_cpus_and_memory_go_with_swapped_devices() -> None:
    """
    S05. The kubelet takes equal pods in another order, and aligns the first to where the second was to go: to count what is
    reserved there beside what it holds would count it twice. What the node has shown of the second stays.
    """
    there = msgspec.structs.replace(block(), nodes=(1,))
    first = reservation("a", reserved_container("GPU-0", cpus="0-3", memory=(block(),)))
    second = reservation("b", reserved_container("GPU-1", cpus="8-11", memory=(there,)))
    other = reservation(
        "b", reserved_container("GPU-1", cpus="8-13", memory=(msgspec.structs.replace(there, size=2048),))
    )
    facts = holding(allocated("GPU-1", pod="a"))

    (alike,) = with_first_shown(first, second).observe(facts).held(100.0)
    (larger,) = with_first_shown(first, other).observe(facts).held(100.0)

    assert (reserved_container("GPU-0", cpus="0-3", memory=(block(),)),) == alike.containers
    assert (ids("GPU-0"), "8-13", 2048) == (
        larger.containers[0].devices[GPU],
        larger.containers[0].cpus,
        larger.containers[0].memory[0].size,
    )


def with_first_shown(*reservations: Reservation) -> NodeReservations:
    """The node has shown CPUs and memory of pod `a`."""
    return after(*reservations).observe(listing(entry("a", cpus="8-11", memory=(block(),))))


def test_a_pod_leaves_to_the_next_what_was_left_for_it() -> None:
    """Each of three equal pods gets what was reserved for another one: the last one has what the first one left."""
    three = [reservation(pod, reserved_container(gpu)) for pod, gpu in (("a", "GPU-0"), ("b", "GPU-1"), ("c", "GPU-2"))]
    first = allocated("GPU-0", pod="c", number=1)
    second = allocated("GPU-1", pod="a", number=2)
    for own in (False, True):
        state = after(*three).observe(holding(first), own=own).observe(holding(first, second), own=own)

        assert [(reserved_container("GPU-2"),)] == rest(state)
        assert ["b"] == [each.pod for each in state.held(100.0)]
        assert [(reserved_container("GPU-2"),)] == rest(state.apply(changed(*three, seq=2), 2, 101.0))


def test_a_decision_counts_swapped_devices_and_none_twice() -> None:
    """GPU-1 belongs to pod a, so what is held for b is GPU-0; a device that anybody has is not held beside that."""
    both = reservation("a", reserved_container("GPU-0")), reservation("b", reserved_container("GPU-1"))
    facts = holding(allocated("GPU-1", pod="a"))
    held = {each for held in with_reserved(facts, facts, both).allocations.values() for each in held.device_ids}
    other = holding(allocated("GPU-1"))

    assert {"GPU-0", "GPU-1"} == held
    assert 2 == len(with_reserved(other, other, both).allocations)


@pytest.mark.parametrize("other", [entry("b", cpus="0-3"), entry("a", name="side", cpus="0-3")])
def test_what_other_containers_have_shows_nothing(other: CheckpointEntry) -> None:
    """A pod that was created again under its name has another UID."""
    state = after(reservation("a", reserved_container(cpus="0-3"))).observe(listing(other))

    assert [(reserved_container(cpus="0-3"),)] == rest(state)


@pytest.mark.parametrize("unknown", ["", "cannot be read"])
def test_podresources_shows_what_a_checkpoint_does_not_tell(unknown: str) -> None:
    """It knows no UIDs, so it counts only where the checkpoint cannot be read."""
    owner = Owner(namespace=Namespace("default"), pod=PodName("a"), container=ContainerName("main"))
    seen = listing(containers=(ContainerUsage(owner=owner, cpus="0-3"),), unknown=unknown)

    state = after(reservation("a", reserved_container(cpus="0-3"))).observe(seen)

    assert [not unknown] == [bool(rest(state))]


def test_companions_end_with_the_gpus_of_their_container() -> None:
    """They come with the GPUs' Allocate or not at all."""
    state = after(reservation("a", reserved_container("GPU-0", co_allocated=("mlx5_0",))))

    assert [(reserved_container(co_allocated=("mlx5_0",)),)] == rest(
        state.observe(holding(allocated("GPU-0")), own=True)
    )
    assert [] == rest(state.observe(holding(allocated("GPU-0", pod="a"))))


def test_a_function_of_a_nic_is_shown_by_itself() -> None:
    """Another function of the same NIC is another pod's. Where two are reserved, both have to be given."""
    mine = with_functions("f1", "f2")
    state = after(reservation("a", mine))

    for functions in (("f3",), ("f1",), ("f2", "f3")):
        assert [(mine,)] == rest(state.observe(holding(given_functions(*functions)), own=True)), functions
    assert [] == rest(state.observe(holding(given_functions("f1", "f2")), own=True))


def with_functions(*functions: str) -> ReservedContainer:
    (nic,) = ids("mlx5_0")
    return ReservedContainer(container=ContainerName("main"), devices={NIC: (nic,)}, virtual_functions={nic: functions})


def given_functions(*functions: str, number: int = 1) -> Allocation:
    reserved, held = with_functions(*functions), allocated(number=number)
    return msgspec.structs.replace(held, devices=reserved.devices, virtual_functions=reserved.virtual_functions)


def test_a_decision_becomes_a_reservation_and_allocations_again() -> None:
    """Companions stay apart. A container that gets nothing of its own is left out."""
    owner = Owner(namespace=Namespace("default"), pod=PodName("a"), container=ContainerName("main"))
    given = msgspec.structs.replace(
        allocated(),
        owner=owner,
        devices={GPU: ids("GPU-0"), NIC: ids("n0", "n1")},
        co_allocated=ids("n1"),
        cpus="0-1",
    )
    empty = Allocation(id=given.id, owner=msgspec.structs.replace(owner, container=ContainerName("none")))

    asked = ContainerRequest(name=owner.container, limits={GPU: 1, NIC: 1, CPU: 2000})
    asking = PodRequest(name=owner.pod, containers=(asked,))

    made = reservation_of("uid-a", asking, (given, empty), 30.0, needs_co_allocated=True)
    (held,) = reserved_allocations(made)

    assert {GPU: ids("GPU-0"), NIC: ids("n0")} == made.containers[0].devices
    assert {NIC: ids("n1")} == made.containers[0].co_allocated
    assert ["main"] == [each.container for each in made.containers]
    assert made.containers[0].needs_co_allocated
    assert (given.devices, given.cpus, "uid-a") == (held.devices, held.cpus, held.pod_uid)
    assert given.co_allocated == held.co_allocated
    assert held.owner is not None
    assert ("", "uid-a") == (held.owner.namespace, held.owner.pod)


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 7), max_size=8))
def test_what_is_held_is_what_is_reserved_without_what_was_seen(pods: list[int], seen: list[int]) -> None:
    """In whatever order it is seen. The naive reference is a set of GPUs for each pod; pod 0 stands for none."""
    expected = {f"p{pod}": {f"GPU-{gpu}" for gpu in range(8) if pods[gpu] == pod} for pod in {*pods} - {0}}
    state = after(*(reservation(pod, reserved_container(*sorted(gpus))) for pod, gpus in expected.items()))

    for gpu in seen:
        state = state.observe(holding(allocated(f"GPU-{gpu}")), own=True)
        for left in expected.values():
            left.discard(f"GPU-{gpu}")

    held = {each.pod: {*each.containers[0].devices[GPU]} for each in state.held(100.0)}
    assert {pod: left for pod, left in expected.items() if left} == held
    assert {f"uid-{pod}" for pod, left in expected.items() if not left} == {*state.ended(100.0).consumed}


def test_a_reservation_travels_on_a_subject_of_its_own() -> None:
    """Of several registries each is a writer: their ids never meet."""
    event = changed(reservation("a", reserved_container("GPU-0")), seq=7, writer="r.1")
    message = wire.encode_event(event, 0.0)

    assert "topoalign.v1.reservation.node-1" == message.subject == wire.reservation_subject(NODE)
    assert "registry-r=2E1.node-1.1.7" == message.headers["ce-id"]
    assert "/topoalign/registry/node-1" == message.headers["ce-source"]
    assert Stream.RESERVATIONS is wire.STORED[type(event)]
    assert event == wire.decode_event(message)


@pytest.mark.parametrize("seconds", [-1.0, 3601.0, 1e300])
def test_a_reservation_without_a_sensible_end_is_undecodable(seconds: float) -> None:
    with pytest.raises(Undecodable, match="seconds_left"):
        wire.decode_event(wire.encode_event(changed(reservation("a", seconds=seconds)), 0.0))


def test_a_node_state_takes_no_reservations() -> None:
    """They are no fact of the node."""
    state = holding(allocated("GPU-0"))

    assert state is state.apply(changed(reservation("a", reserved_container("GPU-1"))))


def test_memory_of_each_size_is_a_part() -> None:
    both = (block(), block("hugepages-2Mi"))
    state = after(reservation("a", reserved_container(memory=both))).observe(listing(entry("a", memory=both[:1])))

    assert [ResourceName("hugepages-2Mi")] == [each.resource for each in rest(state)[0][0].memory]


def test_what_an_init_container_holds_shows_nothing_of_the_next_one() -> None:
    """It takes over the devices, and comes with more: its own part is shown when it has them."""
    first = msgspec.structs.replace(reserved_container("GPU-0", name="first"), role="init")
    state = after(reservation("a", first, reserved_container("GPU-0", "GPU-1", co_allocated=("mlx5_0",))))

    seen = state.observe(holding(allocated("GPU-0")), own=True)

    assert [(reserved_container("GPU-0", "GPU-1", co_allocated=("mlx5_0",)),)] == rest(seen)


def test_an_init_container_takes_over_what_an_earlier_one_holds() -> None:
    """Its part is shown when it holds what is new of it, and all at once when a later container has its turn."""
    first, second = (
        msgspec.structs.replace(reserved_container(*gpus, name=name), role="init")
        for name, *gpus in (("first", "GPU-0"), ("second", "GPU-0", "GPU-1"))
    )
    main = reserved_container("GPU-0", "GPU-1", "GPU-2")
    state = after(reservation("a", first, second, main))

    begun = state.observe(holding(allocated("GPU-0")), own=True)
    taken = begun.observe(holding(allocated("GPU-0"), allocated("GPU-0", "GPU-1", number=2)), own=True)
    ended = taken.observe(holding(allocated("GPU-0", "GPU-1", "GPU-2", pod="a", number=3)), own=True)

    assert [(second, main)] == rest(begun)
    assert [ids("GPU-0"), ids("GPU-0", "GPU-1", "GPU-2")] == [each.devices[GPU] for each in rest(taken)[0]]
    assert [] == rest(ended)


def test_what_was_held_before_a_reservation_shows_nothing_of_it() -> None:
    """The record keeps what a container had for some seconds after its end."""
    before = allocated("GPU-0")
    state = NodeReservations().apply(changed(reservation("a", reserved_container("GPU-0"))), 1, 100.0, [before.id])

    assert [(reserved_container("GPU-0"),)] == rest(state.observe(holding(before), own=True))
    assert [] == rest(state.observe(holding(allocated("GPU-0", number=2)), own=True))


def test_a_nic_is_not_shown_by_a_function_that_was_held_before() -> None:
    first, second = given_functions("f1"), given_functions("f2", number=2)
    pod = reservation("a", with_functions("f1", "f2"))

    for before, is_left in ((first.id, True), (second.id, True), (allocated(number=3).id, False)):
        state = NodeReservations().apply(changed(pod), 1, 100.0, [before])
        assert is_left == bool(rest(state.observe(holding(first, second), own=True))), before


def test_a_message_that_comes_again_makes_nothing_once_more() -> None:
    """Else what was reserved for the pod would be held beside what another has got instead of its own."""
    first, second = reservation("a", reserved_container("GPU-0")), reservation("b", reserved_container("GPU-1"))
    message = changed(first, second, seq=2, made=("uid-a",))
    state = NodeReservations().apply(message, 2, 100.0).observe(holding(allocated("GPU-1", pod="a")))

    again = state.apply(message, 2, 101.0).observe(holding())

    assert [(reserved_container("GPU-0"),)] == rest(state) == rest(again)
    assert ["uid-b"] == [each.pod_uid for each in again.held(101.0)]


def test_what_a_pod_has_taken_is_swapped_for_who_is_heard_of_later() -> None:
    """The reservation of b is received after a was seen with its device."""
    first, second = reservation("a", reserved_container("GPU-0")), reservation("b", reserved_container("GPU-1"))
    seen = holding(allocated("GPU-1", pod="a"))

    state = after(first).observe(seen).apply(changed(first, second, seq=2, made=("uid-b",)), 2, 100.0).observe(seen)

    assert [(reserved_container("GPU-0"),)] == rest(state)
    assert state is state.observe(seen)


def test_a_part_that_was_shown_is_not_swapped() -> None:
    """The init container of b has run on GPU-1, and a gets that before b's next container does."""
    init = msgspec.structs.replace(reserved_container("GPU-1", name="first"), role="init")
    both = reservation("a", reserved_container("GPU-0")), reservation("b", init, reserved_container("GPU-1"))
    ran = holding(allocated("GPU-1", pod="b", name="first"))
    state = after(*both).observe(ran).observe(holding(allocated("GPU-1", pod="a")))

    assert [(reserved_container("GPU-0"),)] == rest(state)


def of_gang(pod: str, *, planned: bool = True) -> Reservation:
    """Of a pod of the gang `g`."""
    return msgspec.structs.replace(reservation(pod, reserved_container("GPU-0"), gang="g"), planned=planned)


def test_what_is_planned_stands_after_what_is_about_to_be_bound() -> None:
    """A pod of the gang keeps no place before another pod once it is to be bound itself; nobody else changes places."""
    planned = [of_gang("a"), of_gang("b")]
    single, other = reservation("q", reserved_container("GPU-1")), reservation("r", reserved_container("GPU-2"))
    bound = of_gang("b", planned=False)
    first = in_order_of_binds(planned, [single])
    second = in_order_of_binds(first, [bound])
    third = in_order_of_binds((other, *second), [], ("uid-q",))

    assert (single, *planned) == first
    assert (single, bound, planned[0]) == second
    assert (other, bound, planned[0]) == third
    assert second == in_order_of_binds(second, [single])


def test_a_plan_that_an_earlier_registry_repeats_is_about_to_be_bound() -> None:
    """It leaves out what it does not know, and appends what it reserves: everybody's own order stays."""
    written = msgspec.json.encode(of_gang("b")).replace(b'"planned":true', b'"unknown":true')
    repeated = msgspec.json.decode(written, type=Reservation)
    single, bound = reservation("q", reserved_container("GPU-1")), of_gang("a", planned=False)

    assert (False, True) == (repeated.planned, of_gang("b").planned)
    assert (bound, repeated, single) == in_order_of_binds((of_gang("a"), repeated), [bound, single])


def test_what_was_held_by_nobody_known_is_swapped_once_that_is_known() -> None:
    """On the node itself: the kubelet comes for b first, which gets what is reserved for a, and tells of b later."""
    both = reservation("a", reserved_container("GPU-0")), reservation("b", reserved_container("GPU-1"))
    unbound = msgspec.structs.replace(allocated("GPU-0", pod="b"), owner=None, pod_uid="")
    state = after(*both).observe(holding(unbound), own=True)

    assert [(reserved_container("GPU-1"),)] == rest(state)
    known = holding(allocated("GPU-0", pod="b"))
    assert [(reserved_container("GPU-1"),)] == rest(state.observe(known, own=True))
    assert {"uid-a"} == {each.pod_uid for each in state.observe(known, own=True).held(100.0)}


def with_slots(pod: str, large: str, small: str, init_name: str) -> Reservation:
    """Of a pod whose app container takes a slot with more over from its init container, and has another one."""
    amounts = {DeviceID(slot): Amount(cores=cores, memory=0) for slot, cores in ((large, 60), (small, 5))}
    init, app = reserved_container(large, name=init_name), reserved_container(large, small, name="app")
    return reservation(
        pod,
        msgspec.structs.replace(init, role="init", slots={DeviceID(large): amounts[DeviceID(large)]}),
        msgspec.structs.replace(app, slots=amounts),
    )


@pytest.mark.parametrize("init_name", ["init", "a"], ids=["name after app", "name before app"])
@pytest.mark.parametrize(("large", "small"), [("GPU-0", "GPU-1"), ("GPU-1", "GPU-0")])
def test_a_slot_is_swapped_for_all_containers_and_for_as_much(large: str, small: str, init_name: str) -> None:
    """Equal pods: b comes first and gets the slots of a."""
    a, b = (with_slots(pod, f"{large}::{n}", f"{small}::{n}", init_name) for n, pod in enumerate("ab"))
    got = holding(allocated(f"{large}::0", f"{small}::0", pod="b", name="app"))
    shown = listing(
        CheckpointEntry(pod_uid="uid-b", container=ContainerName(init_name), devices={GPU: ids(f"{large}::0")}),
        CheckpointEntry(
            pod_uid="uid-b", container=ContainerName("app"), devices={GPU: ids(f"{large}::0", f"{small}::0")}
        ),
    )

    assert b.containers == after(a, b).observe(got, own=True).reservations[0].containers
    assert b.containers == after(a, b).observe(shown).reservations[0].containers
