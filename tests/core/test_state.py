"""A node's state is a fold over its facts: however they come, the same state; and the invariants hold in all of them."""

from collections import Counter

import msgspec
import pytest
from decision_support import admitted, container, machine, pod
from decision_support import node as state_of
from fact_support import Writer
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.model.errors import Contradiction, SequenceGap
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    LedgerEvent,
    MemoryBlock,
    TopologyDiscovered,
)
from topoalign.core.model.ids import GPU, MEMORY, AllocationID, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.state.fold import NodeState, replay

NODE = NodeName("node-1")
HARDWARE = machine()
DEVICES = tuple(HARDWARE.devices[GPU])


@st.composite
def histories(draw: st.DrawFn) -> Writer:
    """What an allocator said: it never gives a device that is held, and binds and releases only what is live."""
    writer = Writer()
    writer.snapshot()
    for number in range(draw(st.integers(0, 12))):
        live = list(writer.state.allocations)
        free = [device for device in DEVICES if device not in writer.state.ownership.holders]
        match draw(st.sampled_from(["grant", "bind", "release", "refuse", "snapshot"])):
            case "grant":
                chosen = draw(st.lists(st.sampled_from(free), unique=True, max_size=3)) if free else []
                writer.say(
                    AllocationGranted(
                        node=NODE,
                        epoch=writer.epoch,
                        seq=writer.seq,
                        allocation=Allocation(
                            id=AllocationID(f"a{number}"), devices={GPU: tuple(chosen)}, memory=draw(memory())
                        ),
                    )
                )
            case "bind" if live:
                writer.bind(draw(st.sampled_from(live)), draw(st.sampled_from(["p1", "p2"])))
            case "release" if live:
                writer.release(draw(st.sampled_from(live)))
            case "snapshot":
                writer.snapshot()
            case _:
                writer.say(refusal(writer))
    return writer


@st.composite
def memory(draw: st.DrawFn) -> tuple[MemoryBlock, ...]:
    blocks = []
    for _ in range(draw(st.integers(0, 2))):
        nodes = draw(st.sampled_from([(0,), (1,), (0, 1)]))
        taken = tuple(draw(st.integers(0, 5)) for _ in nodes)
        blocks.append(MemoryBlock(resource=MEMORY, nodes=nodes, size=sum(taken), taken=taken))
    return tuple(blocks)


def refusal(writer: Writer) -> AllocationRefused:
    return AllocationRefused(
        node=NODE,
        epoch=writer.epoch,
        seq=writer.seq,
        namespace=Namespace("default"),
        pod=PodName("p"),
        container=None,
        reason="TopologyAffinityError",
        code="TopologyAffinityError",
        finding="no",
        remedy="wait",
    )


def naive_live(facts: list[LedgerEvent]) -> dict[str, Allocation]:
    """The live allocations, told anew from all facts: granted and never released, with their last owner."""
    over = {fact.allocation for fact in facts if isinstance(fact, AllocationReleased)}
    live = {fact.allocation.id: fact.allocation for fact in facts if isinstance(fact, AllocationGranted)}
    for fact in facts:
        if isinstance(fact, AllocationBound):
            live[fact.allocation] = msgspec.structs.replace(live[fact.allocation], owner=fact.owner)
    return {name: allocation for name, allocation in live.items() if name not in over}


@given(histories())
def test_replaying_the_log_gives_the_state_that_grew_with_it(writer: Writer) -> None:
    """I4, I9: starting again is replaying."""
    again = replay(NODE, writer.said)

    assert writer.state == again
    assert writer.state.digest == again.digest


@given(histories())
def test_what_is_live_is_what_was_granted_and_not_released(writer: Writer) -> None:
    live = naive_live(writer.said)
    held = Counter(device for allocation in live.values() for device in allocation.device_ids)
    reserved: Counter[int] = Counter()
    touched: Counter[int] = Counter()
    for allocation in live.values():
        for block in allocation.memory:
            for node, taken in zip(block.nodes, block.taken, strict=True):
                reserved[node] += taken
                touched[node] += 1

    assert live == dict(writer.state.allocations)
    assert set(held) == set(writer.state.ownership.holders)
    assert all(count == 1 for count in held.values()), "I1: a device in two live allocations"
    for node, use in writer.state.memory.items():
        assert reserved[node] == use.reserved.get(MEMORY, 0)
        assert touched[node] == use.assignments


@given(histories(), st.data())
def test_repetitions_change_nothing(writer: Writer, data: st.DataObject) -> None:
    """I5, I6: a fact may be received again at any later time."""
    heard: list[LedgerEvent] = []
    for fact in writer.said:
        heard += [fact, *data.draw(st.lists(st.sampled_from([*heard, fact]), max_size=2))]

    assert writer.state == replay(NODE, heard)


@given(histories(), st.data())
def test_a_missing_fact_is_noticed_at_the_next_one(writer: Writer, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(writer.said) - 1))
    before, after = writer.said[:at], writer.said[at + 1 :]
    state = replay(NODE, before)
    if not after:
        return
    if isinstance(after[0], AllocationsSnapshot):
        assert writer.state == replay(NODE, before + after)
        return
    with pytest.raises(SequenceGap) as caught:
        state.apply(after[0])
    assert (NODE, writer.epoch, at + 2) == (caught.value.node, caught.value.epoch, after[0].seq)
    assert state == replay(NODE, before), "a state is never changed by a fact it refuses"


@given(histories(), histories())
def test_a_snapshot_makes_any_listener_whole(writer: Writer, other: Writer) -> None:
    """Whatever was received before, of this epoch or another."""
    confused = replay(NODE, [msgspec.structs.replace(fact, epoch=99) for fact in other.said])
    snapshot = writer.snapshot()

    healed = confused.apply(snapshot)

    assert writer.state.digest == healed.digest
    assert healed.apply(writer.grant("new", "GPU-x")).digest == writer.state.digest


@given(histories())
def test_the_digest_differs_where_the_allocations_do(writer: Writer) -> None:
    before = writer.state.digest
    writer.grant("one-more", "GPU-more")

    assert before != writer.state.digest


@given(histories(), st.lists(st.sampled_from([*HealthState, "cordoned"]), min_size=4, max_size=4))
def test_every_device_is_free_or_held_or_unusable(writer: Writer, states: list[str]) -> None:
    """I2, I3."""
    health = {
        device: DeviceHealth(state=HealthState.HEALTHY, cordoned=True)
        if state == "cordoned"
        else DeviceHealth(state=HealthState(state))
        for device, state in zip(DEVICES, states, strict=True)
    }
    state = writer.state.apply(
        TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="test", topology=HARDWARE)
    ).apply(DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=health))
    free, held = set(state.ownership.free(GPU)), set(state.ownership.holders)
    unusable = {device for device in DEVICES if not state.health_of(device).usable}

    assert set(DEVICES) == free | held | unusable
    assert not free & held
    assert not free & unusable
    assert held <= set(DEVICES)
    assert sorted(free) == sorted(state.ownership.free(GPU))


@given(st.permutations(range(1, 6)))
def test_the_newest_revision_counts_in_whatever_order_readings_come(revisions: list[int]) -> None:
    """Of several readings the newest revision counts, in whatever order they come."""
    state = NodeState(node=NODE)
    for revision in revisions:
        devices = {DeviceID("GPU-0"): DeviceHealth(state=HealthState.UNKNOWN, reason=str(revision))}
        state = state.apply(DeviceHealthChanged(node=NODE, epoch=1, revision=revision, devices=devices))

    assert "5" == state.health_of(DeviceID("GPU-0")).reason


def test_a_writer_that_began_afresh_is_believed_at_once() -> None:
    state = NodeState(node=NODE)
    for epoch, revision in ((1, 9), (2, 1)):
        state = state.apply(DeviceHealthChanged(node=NODE, epoch=epoch, revision=revision, devices={}))

    assert state.health is not None
    assert (2, 1) == (state.health.epoch, state.health.revision)


def test_a_digest_is_sixteen_hexadecimal_digits_and_no_matter_of_order() -> None:
    """Listeners of other versions compare it as text."""
    a, b = (Allocation(id=AllocationID(name)) for name in "ab")
    one, other = (NodeState(node=NODE).holding(first).holding(second) for first, second in ((a, b), (b, a)))

    assert one.digest == other.digest != NodeState(node=NODE).digest
    assert 16 == len(one.digest) and {*one.digest} <= {*"0123456789abcdef"}


def test_of_an_epoch_that_has_not_begun_no_fact_is_known() -> None:
    """The gap begins at 0, whatever had been known the epoch before it."""
    writer = Writer()
    writer.snapshot()
    fact = msgspec.structs.replace(writer.grant("a", "GPU-0"), epoch=writer.epoch + 1, seq=9)

    with pytest.raises(SequenceGap) as caught:
        writer.state.apply(fact)

    assert (writer.epoch + 1, 0, 9) == (caught.value.epoch, caught.value.have, caught.value.got)


def test_an_owner_of_what_is_not_live_is_a_contradiction() -> None:
    writer = Writer()
    writer.snapshot()
    writer.grant("a", "GPU-0")
    bound = writer.bind("a", "p")

    with pytest.raises(Contradiction, match="'a' was bound and is not live"):
        replay(NODE, [writer.said[0], msgspec.structs.replace(writer.said[0], seq=2), bound])


@pytest.mark.parametrize(
    ("given_in", "bound_in", "expected"), [("one", "", "one"), ("one", "two", "two"), ("", "two", "two"), ("", "", "")]
)
def test_an_allocation_is_of_the_boot_in_which_it_was_seen_last(given_in: str, bound_in: str, expected: str) -> None:
    """A boot that nobody named says nothing of the one that is known."""
    writer = Writer()
    writer.snapshot()
    allocation = Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-0"),)}, boot=given_in)
    writer.say(AllocationGranted(node=NODE, epoch=writer.epoch, seq=writer.seq, allocation=allocation))
    bound = writer.bind("a", "p")

    state = replay(NODE, [*writer.said[:-1], msgspec.structs.replace(bound, boot=bound_in)])

    assert expected == state.allocations[AllocationID("a")].boot


@pytest.mark.parametrize(("given_in", "stale"), [("before", True), ("now", False), ("", False)])
def test_an_allocation_of_an_earlier_boot_is_stale(given_in: str, stale: bool) -> None:
    """One of which the boot is not known is not, and none is before the hardware was discovered."""
    held = Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-0"),)}, boot=given_in)
    state = NodeState(node=NODE).holding(held)
    found = TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="now", source="test", topology=HARDWARE)

    assert ("a",) * stale == state.apply(found).stale
    assert () == state.apply(msgspec.structs.replace(found, boot_id="")).stale == state.stale


def test_what_is_held_and_no_longer_usable_is_named_with_its_health() -> None:
    """In the order of the names. What is well, and what nobody holds, is not named."""
    ill, well = DeviceHealth(state=HealthState.UNHEALTHY, reason="lost"), DeviceHealth(state=HealthState.HEALTHY)
    held = Allocation(id=AllocationID("a"), devices={GPU: (DEVICES[2], DEVICES[1], DEVICES[0])})
    told = dict.fromkeys(DEVICES, ill) | {DEVICES[1]: well}
    state = NodeState(node=NODE).apply(DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=told))

    assert [(DEVICES[0], ill), (DEVICES[2], ill)] == [*state.ailing(held).items()]


def test_a_device_nobody_judged_is_not_offered() -> None:
    """Unknown health is not health."""
    state = NodeState(node=NODE).apply(
        TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="test", topology=HARDWARE)
    )

    assert () == tuple(state.ownership.free(GPU))


def test_the_cpus_of_an_allocation_are_parsed_once_per_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The CPUs of an allocation are parsed once for all containers of a pod: once when it is made, so that a bad list is
    found, and once when they are first needed.
    """
    read = Counter[str]()

    def counting(text: str) -> frozenset[int]:
        read[text] += 1
        return parse_cpuset(text)

    for module in ("model.allocations", "state.fold", "hints.reuse"):
        monkeypatch.setattr(f"topoalign.core.{module}.parse_cpuset", counting, raising=False)
    asking = pod(*(container(f"c{i}", cpus=2, gib=1) for i in range(10)))

    given = admitted(admit(state_of(machine(cores=16)), asking, AdmissionRules(mode=Mode.KUBELET)))

    assert {held.cpus for held in given.values()} == {text for text in read if text}
    assert 2 >= max(amount for text, amount in read.items() if text)
