"""What the kubelet forgot to say, said late or said wrongly is corrected at the next poll, and never by a guess."""

from itertools import permutations

import anyio
import msgspec
import pytest
from device_allocations_support import GPUS, MACHINE, Node, ShiftingClock, bound, polled_after, start_allocations
from fact_support import owner
from structlog.testing import capture_logs

from topoalign.allocator.allocate.service import FRESH_SECONDS
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import ResourceEntry
from topoalign.allocator.reconciliation.reconciliation import APART_SECONDS
from topoalign.core.model.errors import (
    DeviceInUse,
    DeviceUnusable,
    HardwareUnknown,
    InvalidField,
    StateFault,
    Unavailable,
)
from topoalign.core.model.events import (
    AllocationBound,
    AllocationDeviated,
    AllocationReleased,
    ContainerUsage,
    DeviceHealth,
    HealthState,
)
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.ports import JournalEntry
from topoalign.core.state.fold import replay
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio


@pytest.fixture
def node() -> Node:
    return Node()


# After a reboot


async def test_after_a_reboot_stale_records_are_kept_until_the_kubelet_settles(node: Node) -> None:
    """
    After a reboot old records are stale, and kept until the kubelet has settled. The age of the kubelet by the wall clock
    is no evidence: a reboot is when clocks are set.
    """
    await bound(node, "train", GPUS[0])
    await bound(node, "back", GPUS[1])
    old = {node.allocation(GPUS[0]).id, node.allocation(GPUS[1]).id}
    node.boot, node.kubelet.kubelet, node.kubelet.shown = "another boot", 2, []
    node.restart()
    stale = set(node.ledger.state.stale)
    await node.device_allocations.reconcile()
    await node.clock.advance(119)
    await node.device_allocations.reconcile()
    kept = node.live()
    node.kubelet.show("back", GPUS[1])
    await node.clock.advance(1)
    await node.device_allocations.reconcile()

    assert old == stale
    assert {"GPU-0": "train", "GPU-1": "back"} == kept
    assert {"GPU-1": "back"} == node.live()
    assert () == node.ledger.state.stale, "seen again since the reboot"
    assert ["orphan"] == [event.reason for event in node.said(AllocationReleased)]


@pytest.mark.parametrize("adopted", [False, True], ids=["given", "adopted"])
async def test_after_a_reboot_what_was_never_bound_is_stale_too(node: Node, adopted: bool) -> None:
    if adopted:
        node.kubelet.show("train", GPUS[0])
        await node.device_allocations.reconcile()
    else:
        await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    node.boot = "another boot"
    node.restart()

    assert (node.allocation(GPUS[0]).id,) == node.ledger.state.stale


async def test_a_restart_of_the_allocator_alone_makes_nothing_stale(node: Node) -> None:
    await bound(node, "train", GPUS[0])
    node.restart()

    assert () == node.ledger.state.stale


async def test_allocate_is_refused_before_discovery_has_published(node: Node) -> None:
    """Before discovery has published, Allocate is refused, and never answered without a device."""
    await bound(node, "train", GPUS[0])
    ledger = Ledger(node.ledger.node, node.journal, node.clock)
    device_allocations = start_allocations(ledger, node.kubelet)
    for devices in ([GPUS[0]], [GPUS[3]]):
        with pytest.raises(HardwareUnknown):
            await device_allocations.allocate(GPU, [devices])
    node.hear_topology(ledger, 1)
    with pytest.raises(HardwareUnknown):
        await device_allocations.allocate(GPU, [[GPUS[3]]])

    assert ["train"] == [held.owner.pod for held in ledger.state.allocations.values() if held.owner]


async def test_before_discovery_publishes_a_poll_of_the_kubelet_changes_nothing(node: Node) -> None:
    """Which of the devices that it shows are ours cannot be told yet."""
    await bound(node, "train", GPUS[0], GPUS[1])
    node.kubelet.usage = (ContainerUsage(owner=owner("train"), devices={GPU: GPUS[:2]}),)
    ledger = Ledger(node.ledger.node, node.journal, node.clock)
    device_allocations = start_allocations(ledger, node.kubelet)
    for _ in range(3):
        await device_allocations.reconcile()
        await node.clock.advance(200)

    assert ["train"] == [held.owner.pod for held in ledger.state.allocations.values() if held.owner]
    assert None is ledger.state.usage


# A disk that is full for long


class FullJournal(MemoryJournal):
    full = False

    def append(self, entry: JournalEntry) -> None:
        if self.full:
            raise StateFault("cannot write the journal", "make room")
        super().append(entry)


async def test_what_is_taken_in_is_logged_once_when_it_is_written() -> None:
    """What cannot be written is not logged as taken in at every poll, but once when it is."""
    journal = FullJournal()
    node = Node(journal)
    node.kubelet.show("train", GPUS[0])
    journal.full = True
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(Unavailable, match="cannot write the journal"):
                await node.device_allocations.reconcile()
        assert ["the journal cannot be written"] == [line["event"] for line in logs]
        assert {} == node.live()

        journal.full = False
        for _ in range(3):
            await node.device_allocations.reconcile()

    assert [
        "the journal can be written again",
        "unrecorded containers are added to the record",
    ] == [line["event"] for line in logs[1:]]
    assert {"GPU-0": "train"} == node.live()


# Orphans


async def test_an_orphan_is_released_at_the_first_poll_if_the_checkpoint_agrees(node: Node) -> None:
    """An orphan is released at the first poll where the checkpoint agrees."""
    await bound(node, "train", GPUS[0])
    await bound(node, "stays", GPUS[1])
    del node.kubelet.shown[0]
    node.restart()
    await node.device_allocations.reconcile()

    assert {"GPU-1": "stays"} == node.live()
    assert ["orphan"] == [event.reason for event in node.said(AllocationReleased)]


@pytest.mark.parametrize(
    "why", ["the checkpoint has it", "the checkpoint cannot be read", "the kubelet is new", "no pods"]
)
async def test_an_orphan_waits_where_the_kubelet_may_only_not_have_said_so(node: Node, why: str) -> None:
    await bound(node, "train", GPUS[0])
    node.kubelet.shown.clear()
    match why:
        case "the checkpoint has it":
            node.kubelet.checkpoint = frozenset({(GPU, GPUS[0])})
        case "the checkpoint cannot be read":
            node.kubelet.checkpoint = None
        case "the kubelet is new":
            node.kubelet.kubelet, node.kubelet.since = 2, node.clock.wall()
        case _:
            node.kubelet.pods = 0
    node.restart()
    await node.device_allocations.reconcile()
    after_one_look = node.live()
    await node.clock.advance(120)
    await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == after_one_look
    assert {} == node.live()


async def test_a_container_shown_with_more_than_is_recorded_is_recorded_anew(node: Node) -> None:
    """
    A container that is shown with more than is recorded is recorded anew with all of it. A part of what it holds must not
    count as free.
    """
    await bound(node, "train", GPUS[0])
    node.kubelet.shown.clear()
    node.kubelet.show("train", GPUS[0], GPUS[1])
    for _ in range(2):
        await node.device_allocations.reconcile()
        await node.clock.advance(APART_SECONDS)

    assert {"GPU-0,GPU-1": "train"} == node.live()


async def test_a_gpu_that_has_vanished_does_not_cost_its_container_the_record(node: Node) -> None:
    await bound(node, "train", GPUS[0], GPUS[1])
    held = node.allocation(GPUS[0], GPUS[1]).id
    node.topology = msgspec.structs.replace(MACHINE, gpus=MACHINE.gpus[1:])
    node.hear_topology(node.ledger, 2)
    for _ in range(3):
        await node.device_allocations.reconcile()

    assert [held] == list(node.ledger.state.allocations)


async def test_what_ends_while_the_allocator_runs_is_no_orphan(node: Node) -> None:
    await bound(node, "train", GPUS[0])
    node.restart()
    await node.device_allocations.reconcile()
    node.kubelet.shown.clear()
    for _ in range(2):
        await node.device_allocations.reconcile()
        await node.clock.advance(5)

    assert ["gone"] == [event.reason for event in node.said(AllocationReleased)]


async def test_a_kubelet_that_restarts_begins_anew_to_miss_a_container(node: Node) -> None:
    """What its predecessor did not show says nothing of what it will show when it has read its pods."""
    await bound(node, "train", GPUS[0])
    node.kubelet.shown.clear()
    await node.device_allocations.reconcile()
    await node.clock.advance(4)
    node.kubelet.kubelet = 2

    assert ({"GPU-0": "train"}, {}) == await polled_after(node, 119, 1)


async def test_one_poll_releases_nothing_whatever_the_waits_are_set_to() -> None:
    node = Node(gone_seconds=0, unbound_seconds=0, settle_seconds=0)
    await bound(node, "train", GPUS[0])
    await node.device_allocations.allocate(GPU, [[GPUS[1]]])
    node.kubelet.shown.clear()
    await node.device_allocations.reconcile()
    after_one_look = node.live()
    await node.device_allocations.reconcile()

    assert {"GPU-0": "train", "GPU-1": None} == after_one_look
    assert {} == node.live()


# Identity


async def test_a_pod_replaced_by_one_with_the_same_devices_is_told_apart(node: Node) -> None:
    """
    A pod replaced by another with the same devices between two polls is told apart. Force-deleted, and its devices given on
    at once: Allocate finds that nobody shows them any more.
    """
    await bound(node, "first", GPUS[0], GPUS[1])
    first = node.allocation(GPUS[0], GPUS[1]).id
    node.kubelet.shown.clear()
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.show("second", GPUS[0], GPUS[1])
    await node.device_allocations.reconcile()

    assert {"GPU-0,GPU-1": "second"} == node.live()
    assert [(first, "superseded")] == [(event.allocation, event.reason) for event in node.said(AllocationReleased)]


async def test_two_pods_of_one_name_are_told_apart_by_their_devices(node: Node) -> None:
    """As when a pod is deleted and made anew, and the first has not ended yet: each record has all that its pod holds."""
    await bound(node, "train", GPUS[0])
    await bound(node, "train", GPUS[1])
    before = dict(node.ledger.state.allocations)
    for _ in range(3):
        await node.device_allocations.reconcile()
        await node.clock.advance(5)

    assert {"GPU-0": "train", "GPU-1": "train"} == node.live()
    assert before == node.ledger.state.allocations, "and none was recorded anew"


async def test_owners_that_were_read_the_wrong_way_round_are_swapped(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    await node.device_allocations.allocate(GPU, [[GPUS[4]]])
    node.kubelet.show("one", GPUS[4])
    node.kubelet.show("two", GPUS[0])
    await node.device_allocations.reconcile()
    wrong = node.live()
    node.kubelet.shown.clear()
    node.kubelet.show("one", GPUS[0])
    node.kubelet.show("two", GPUS[4])
    await node.device_allocations.reconcile()

    assert {"GPU-0": "two", "GPU-4": "one"} == wrong
    assert {"GPU-0": "one", "GPU-4": "two"} == node.live()
    assert [owner("two"), owner("one"), owner("one"), owner("two")] == [e.owner for e in node.said(AllocationBound)]
    assert node.live() == {
        ",".join(a.devices[GPU]): a.owner.pod if a.owner else None
        for a in replay(node.ledger.node, [event for event, _ in node.ledger.pending]).allocations.values()
    }


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_equal_allocates_in_any_order_are_bound_to_whom_the_kubelet_shows(
    node: Node, order: tuple[int, ...]
) -> None:
    """Three pods of one size: until one is shown its owner is unknown, and no other pod's."""
    async with anyio.create_task_group() as tasks:
        for at in order:
            tasks.start_soon(node.device_allocations.allocate, GPU, [[GPUS[at]]])
    unknown = node.live()
    for at in order:
        node.kubelet.show(f"pod-{at}", GPUS[at])
        await node.device_allocations.reconcile()
        assert {None, f"pod-{at}"} >= {node.live()[f"GPU-{at}"]}

    assert {f"GPU-{at}": None for at in order} == unknown
    assert {f"GPU-{at}": f"pod-{at}" for at in order} == node.live()


async def test_the_app_container_takes_over_the_gpus_of_its_init_container(node: Node) -> None:
    """
    The app container takes over the GPUs of its init container, and never those of its sidecar. Three Allocate calls of one
    pod; PodResources shows none of it before the pod is admitted.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    init = node.allocation(GPUS[0], GPUS[1]).id
    await node.device_allocations.allocate(GPU, [[GPUS[2]]])
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1], GPUS[3]]])
    node.kubelet.show("sidecar", GPUS[2])
    node.kubelet.show("app", GPUS[0], GPUS[1], GPUS[3])
    await node.device_allocations.reconcile()

    assert {"GPU-2": "sidecar", "GPU-0,GPU-1,GPU-3": "app"} == node.live()
    assert [(init, "superseded")] == [(event.allocation, event.reason) for event in node.said(AllocationReleased)]
    with pytest.raises(DeviceInUse):
        await node.device_allocations.allocate(GPU, [[GPUS[2], GPUS[4]]])


async def test_another_choice_than_the_preferred_is_an_event_with_both_sets(
    node: Node,
) -> None:
    """Another choice than the preferred one is an event with both sets, and the record is what was chosen."""
    preferred = await node.device_allocations.prefer(GPU, GPUS, (), 2)
    await bound(node, "train", GPUS[6], GPUS[7])

    (deviation,) = node.said(AllocationDeviated)
    assert (preferred, (GPUS[6], GPUS[7])) == (deviation.preferred, deviation.allocated)
    assert (node.allocation(GPUS[6], GPUS[7]).id, {"GPU-6,GPU-7": "train"}) == (deviation.allocation, node.live())


# Answers that are older than the record


async def test_an_answer_on_its_way_does_not_release_what_is_named_meanwhile(node: Node) -> None:
    """
    An answer of PodResources on its way does not release what the kubelet names meanwhile. It was asked before the kubelet
    said Allocate again for what it has given out already.
    """
    await bound(node, "train", GPUS[0])
    shown, node.kubelet.shown = node.kubelet.shown, []
    await node.device_allocations.reconcile()
    await node.clock.advance(5)

    async def again() -> None:
        node.kubelet.shown = shown
        await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    node.kubelet.meanwhile = again
    await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == node.live()


async def test_a_contradicted_record_makes_way_only_for_what_takes_its_place(node: Node) -> None:
    """
    A contradicted record makes way only together with what takes its place. An answer older than the newest grant takes
    nothing in; what an init container still has would be lost for good.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.show("train", GPUS[0])
    node.kubelet.checkpoint = frozenset({(GPU, GPUS[0]), (GPU, GPUS[1])})
    node.kubelet.parts = (ResourceEntry(GPU, frozenset(GPUS[:2])),)
    await node.device_allocations.reconcile()
    await node.clock.advance(APART_SECONDS)
    node.kubelet.meanwhile = lambda: node.device_allocations.allocate(GPU, [[GPUS[5]]])
    await node.device_allocations.reconcile()
    while_one_was_granted = node.live()
    await node.device_allocations.reconcile()

    assert {"GPU-0,GPU-1": None, "GPU-5": None} == while_one_was_granted
    assert {"GPU-0": "train", "GPU-1": None, "GPU-5": None} == node.live()


async def test_a_contradicted_record_and_its_replacement_are_one_entry(node: Node) -> None:
    """
    A contradicted record and what takes its place are one entry of the journal. Else a crash in between leaves devices that
    a container holds in no record.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.show("train", GPUS[0], GPUS[2])
    await node.device_allocations.reconcile()
    await node.clock.advance(APART_SECONDS)
    await node.device_allocations.reconcile()

    assert ["AllocationReleased", "AllocationGranted"] == [
        type(event).__name__ for event in node.journal.load()[-1].events
    ]


# Many who ask at once


@pytest.mark.parametrize("answering", [True, False])
async def test_containers_that_start_at_once_share_a_poll(node: Node, answering: bool) -> None:
    """One after the other they would wait longer for a kubelet that is slow than the 30 s it gives each of them."""
    node.kubelet.answering = answering
    outcomes: list[bool] = []

    async def start() -> None:
        try:
            await node.device_allocations.reconcile()
            outcomes.append(True)
        except Unavailable:
            outcomes.append(False)

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(start)

    assert [answering] * 100 == outcomes
    assert node.kubelet.asked <= 2


async def test_a_caller_during_a_poll_gets_one_that_began_later(node: Node) -> None:
    """
    Who asks while a poll is on its way gets the result of one that began later. The kubelet may have given the devices only
    after it was asked.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    async with anyio.create_task_group() as tasks:

        async def given() -> None:
            node.kubelet.show("train", GPUS[0])
            tasks.start_soon(node.device_allocations.reconcile)

        node.kubelet.meanwhile = given
        await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == node.live()


async def test_a_poll_that_is_cancelled_serves_nobody(node: Node) -> None:
    """Its container was given up while it started; the next one asks for itself."""
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    node.kubelet.show("train", GPUS[0])
    async with anyio.create_task_group() as tasks:

        async def broken_off() -> None:
            scope.cancel()
            await anyio.lowlevel.checkpoint()

        with anyio.CancelScope() as scope:
            node.kubelet.meanwhile = broken_off
            tasks.start_soon(node.device_allocations.reconcile)
            await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == node.live()


# Devices that are divided otherwise than before


def divided(replicas: int, most: int | None = None) -> tuple[Offer, ...]:
    return (Offer(resource=GPU, devices=GPUS, replicas=replicas, most=most),)


async def test_after_a_change_from_whole_gpus_to_shares_no_card_is_given_twice(node: Node) -> None:
    await bound(node, "whole", GPUS[0])
    node.topology = msgspec.structs.replace(MACHINE, offers=divided(2))
    node.hear_topology(node.ledger, 2)
    for share in ("GPU-0::0", "GPU-0::1"):
        with pytest.raises((DeviceUnusable, DeviceInUse)):
            await node.device_allocations.allocate(GPU, [[DeviceID(share)]])
    node.kubelet.shown.clear()
    for _ in range(2):
        await node.device_allocations.reconcile()
        await node.clock.advance(5)
    shares = [DeviceID("GPU-0::0"), DeviceID("GPU-0::1")]
    await node.device_allocations.allocate(GPU, [[shares[0]]])
    await node.device_allocations.allocate(GPU, [[shares[1]]])

    assert {"GPU-0::0": None, "GPU-0::1": None} == node.live()


async def test_a_container_with_a_former_share_keeps_the_card_from_others(node: Node) -> None:
    """
    A container with a share from before keeps the whole card from others. It is shown under an id, and perhaps a resource,
    that is offered no more: its card is ours all the same.
    """
    node.kubelet.show("shared", DeviceID("GPU-3::1"), resource=ResourceName("nvidia.com/gpu.shared"))
    await node.device_allocations.reconcile()
    with pytest.raises((DeviceUnusable, DeviceInUse)):
        await node.device_allocations.allocate(GPU, [[GPUS[3]]])

    (held,) = node.ledger.state.allocations.values()
    assert (owner("shared"), frozenset({"GPU-3::1"})) == (held.owner, held.device_ids)


@pytest.mark.parametrize("order", list(permutations(["GPU-3", "GPU-3::1"])))
async def test_a_card_that_is_shown_whole_and_in_shares_is_taken_in_once(node: Node, order: tuple[str, str]) -> None:
    for name in order:
        node.kubelet.show(name, DeviceID(name))
    await node.device_allocations.reconcile()

    assert {order[0]: order[0]} == node.live()


async def test_more_shares_than_a_container_may_have_are_refused_with_the_remedy(node: Node) -> None:
    node.topology = msgspec.structs.replace(MACHINE, offers=divided(4, most=1))
    node.hear_topology(node.ledger, 2)
    with pytest.raises(InvalidField) as refused:
        await node.device_allocations.allocate(GPU, [[DeviceID("GPU-0::0"), DeviceID("GPU-1::0")]])

    assert "request 1" in refused.value.remedy
    assert {} == node.live()


async def test_of_several_offers_the_one_that_allows_least_decides(node: Node) -> None:
    """One resource offers some cards in shares one at a time, and others two at a time: a container may have one."""
    offers = (
        Offer(resource=GPU, devices=GPUS[:4], replicas=4, most=1),
        Offer(resource=GPU, devices=GPUS[4:], replicas=4, most=2),
    )
    node.topology = msgspec.structs.replace(MACHINE, offers=offers)
    node.hear_topology(node.ledger, 2)
    with pytest.raises(InvalidField) as refused:
        await node.device_allocations.allocate(GPU, [[DeviceID("GPU-0::0"), DeviceID("GPU-1::0")]])

    assert "request 1" in refused.value.remedy
    assert {} == node.live()


async def test_with_an_unreadable_checkpoint_an_init_container_keeps_its_gpu(node: Node) -> None:
    """
    Where the checkpoint cannot be read, what an init container had stays held. The app container takes over one of its two
    GPUs. The other is not shown, and may be held all the same.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.checkpoint = None
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert {"GPU-0": None, "GPU-1": None} == node.live()


# Time


@pytest.mark.parametrize("set_by", [86_400.0, -86_400.0, -1e9])
async def test_a_wall_clock_that_jumps_releases_nothing_and_keeps_the_order(set_by: float) -> None:
    clock = ShiftingClock()
    node = Node(clock=clock)
    await bound(node, "train", GPUS[0])
    shown, node.kubelet.shown = node.kubelet.shown, []
    await node.device_allocations.reconcile()
    clock.set_by = set_by
    await node.device_allocations.reconcile()
    after_the_jump = node.live()
    node.kubelet.shown = shown
    await node.device_allocations.reconcile()
    before = (node.ledger.state.epoch, node.ledger.state.seq)
    node.restart()

    assert {"GPU-0": "train"} == after_the_jump == node.live()
    assert before < (node.ledger.state.epoch, node.ledger.state.seq)


async def test_a_kubelet_that_restarts_before_discovery_publishes_is_new() -> None:
    """
    A kubelet that restarts before discovery has published is new, whatever its age by the wall clock. It was seen before,
    so its age need not be told by a wall clock that may have been set since.
    """
    clock = ShiftingClock()
    node = Node(clock=clock)
    await bound(node, "train", GPUS[0])
    node.ledger = Ledger(node.ledger.node, node.journal, clock)
    device_allocations = start_allocations(node.ledger, node.kubelet)
    await device_allocations.reconcile()
    node.kubelet.kubelet, node.kubelet.since, node.kubelet.shown = 2, clock.wall(), []
    clock.set_by = 86_400.0
    node.hear_topology(node.ledger, 1)
    for _ in range(3):
        await device_allocations.reconcile()
        await clock.advance(10)

    assert {"GPU-0": "train"} == node.live()


async def test_after_a_reboot_a_kubelet_seen_before_discovery_is_new() -> None:
    """
    After a reboot a kubelet that was seen before discovery is new, whatever its age by the wall clock. Which boot this is
    comes with the hardware; until then the kubelet's age by the wall clock may have been believed.
    """
    clock = ShiftingClock()
    node = Node(clock=clock)
    await bound(node, "train", GPUS[0])
    node.kubelet.checkpoint = frozenset({(GPU, GPUS[0])})
    node.boot, node.kubelet.kubelet, node.kubelet.since, node.kubelet.shown = "another boot", 2, clock.wall(), []
    clock.set_by = 86_400.0
    node.ledger = Ledger(node.ledger.node, node.journal, clock)
    device_allocations = start_allocations(node.ledger, node.kubelet)
    await device_allocations.reconcile()
    node.hear_topology(node.ledger, 1)
    for _ in range(4):
        await device_allocations.reconcile()
        await clock.advance(30)
    kept = node.live()
    await device_allocations.reconcile()

    assert {"GPU-0": "train"} == kept
    assert {} == node.live()


async def test_a_stopped_process_releases_nothing_for_the_time_of_its_stop() -> None:
    """
    A process that was stopped releases nothing because of the time it was stopped. Missed at two polls, milliseconds apart,
    and stopped in between: that is no evidence of five seconds.
    """
    clock = ShiftingClock()
    node = Node(clock=clock)
    await bound(node, "train", GPUS[0])
    shown, node.kubelet.shown = node.kubelet.shown, []
    await node.device_allocations.reconcile()

    async def stopped() -> None:
        clock.stop(60)
        node.kubelet.shown = shown  # it came back meanwhile

    node.kubelet.meanwhile = stopped
    asked = node.kubelet.asked
    await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == node.live()
    assert 2 == node.kubelet.asked - asked, "an answer from before is asked for again"


async def test_an_allocate_stopped_on_its_way_is_judged_by_a_fresh_answer() -> None:
    """An Allocate that was stopped on its way is judged by a fresh answer."""
    clock = ShiftingClock()
    node = Node(clock=clock)
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    async def stopped() -> None:
        clock.stop(60)
        node.kubelet.show("train", GPUS[0])

    node.kubelet.meanwhile = stopped
    with pytest.raises(DeviceInUse):
        await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])


async def test_answers_that_always_come_too_late_are_a_kubelet_that_is_away() -> None:
    clock = ShiftingClock()
    node = Node(clock=clock)

    async def late() -> None:
        clock.stop(FRESH_SECONDS + 1)
        node.kubelet.meanwhile = late

    node.kubelet.meanwhile = late
    with pytest.raises(Unavailable, match="so late"):
        await node.device_allocations.reconcile()


async def test_an_allocate_first_ensures_that_the_health_is_fresh() -> None:
    """Before anything is given out, `ensure_fresh` confirms what is known of the devices."""
    sick = DeviceHealth(state=HealthState.UNHEALTHY, reason="XID 79")

    async def ask() -> None:
        it.hear_health(it.ledger, 2, {**dict.fromkeys(GPUS, DeviceHealth(state=HealthState.HEALTHY)), GPUS[0]: sick})

    it = Node(ensure_fresh=ask)
    with pytest.raises(DeviceUnusable, match="XID 79"):
        await it.device_allocations.allocate(GPU, [[GPUS[0]]])
