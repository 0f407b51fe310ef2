"""What a pod that is gone held is free in the record, and no record of a container that runs is lost without a word."""

import anyio
import pytest
from device_allocations_support import GPUS, NODE, Node, bound
from fact_support import owner
from structlog.testing import capture_logs

from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.ledger.ledger import MOST_EXPLAINED, REMEMBERED, ReleaseLog
from topoalign.allocator.metrics.allocator_metrics import figures
from topoalign.allocator.ports import ReportedDevices, ResourceEntry
from topoalign.allocator.reconciliation.displacement import remainders
from topoalign.allocator.reconciliation.reconciliation import APART_SECONDS
from topoalign.allocator.requests.admissions import Admissions
from topoalign.allocator.service import Allocator
from topoalign.core.model.decisions import Explained
from topoalign.core.model.errors import NotFound, StateFault
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    ContainerUsage,
    Displaced,
)
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, ExplainRequest
from topoalign.core.state.fold import replay
from topoalign.kubelet.files.pod_directories import PodDirectories
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.metrics import registry_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def node() -> Node:
    it = Node(settle_seconds=0)
    directories(it)
    return it


def directories(node: Node, *pods: str, torn_down: tuple[str, ...] = ()) -> None:
    """These pods have a directory."""
    node.kubelet.directories = PodDirectories(
        torn_down={**dict.fromkeys(pods, False), **dict.fromkeys(torn_down, True)}
    )


def write(node: Node, *parts: ResourceEntry) -> None:
    """The kubelet writes its checkpoint: these entries, and no others."""
    node.kubelet.version, node.kubelet.written_by = node.kubelet.version + 1, node.kubelet.kubelet
    node.kubelet.parts = parts
    node.kubelet.checkpoint = frozenset((part.resource, device) for part in parts for device in part.devices)


def entry(uid: str, *devices: DeviceID) -> ResourceEntry:
    return ResourceEntry(GPU, frozenset(devices), uid, "main")


async def runs(node: Node, pod: str, uid: str, *devices: DeviceID) -> None:
    """A pod is given these devices, starts, and is seen with them."""
    await node.device_allocations.allocate(GPU, [list(devices)])
    write(node, *node.kubelet.parts, entry(uid, *devices))
    show(node, pod, uid, *devices)
    known = node.kubelet.directories
    assert known is not None
    node.kubelet.directories = PodDirectories(torn_down={**known.torn_down, uid: False})
    await node.device_allocations.reconcile()


def show(node: Node, pod: str, uid: str, *devices: DeviceID) -> None:
    node.kubelet.shown.append(ReportedDevices(owner=owner(pod), resource=GPU, devices=frozenset(devices), pod_uid=uid))
    node.kubelet.usage = (*node.kubelet.usage, ContainerUsage(owner=owner(pod), devices={GPU: devices}))


async def later(node: Node, seconds: float) -> None:
    """So much time passes, with a poll every five seconds."""
    for _ in range(int(seconds // 5)):
        await node.device_allocations.reconcile()
        await node.clock.advance(5)
    await node.device_allocations.reconcile()


# A pod that was refused after Allocate


async def test_a_pod_refused_after_allocate_frees_its_gpus(
    node: Node,
) -> None:
    """
    A pod that was refused after Allocate frees its GPUs while the checkpoint still has them. The CPU manager refuses it
    once its devices are written down; the file keeps them until the kubelet's next write.
    """
    await node.device_allocations.allocate(GPU, [list(GPUS[4:])])
    write(node, entry("uid-refused", *GPUS[4:]))
    await node.device_allocations.reconcile()
    after_one_poll = node.live()
    await later(node, 5)

    assert {"GPU-4,GPU-5,GPU-6,GPU-7": None} == after_one_poll
    assert {} == node.live()
    assert ["gone"] == [event.reason for event in node.said(AllocationReleased)]


async def test_a_pod_with_volumes_torn_down_frees_what_its_init_container_had(node: Node) -> None:
    """A pod whose volumes are torn down frees what its init container had."""
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node, entry("uid-1", GPUS[0]))
    directories(node, "uid-1")
    await later(node, 60)
    while_it_ran = node.live()
    directories(node, torn_down=("uid-1",))
    await later(node, 5)

    assert {"GPU-0": None} == while_it_ran
    assert {} == node.live()


async def test_without_pod_directories_a_checkpoint_entry_keeps_the_record(node: Node) -> None:
    """Without pod directories an entry of the checkpoint keeps the record."""
    node.kubelet.directories = None
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node, entry("uid-refused", GPUS[0]))
    await later(node, 300)

    assert {"GPU-0": None} == node.live()


async def test_an_entry_from_before_the_grant_says_nothing_of_a_new_pod(node: Node) -> None:
    """
    An entry from before the grant says nothing of a pod that is being admitted. The file still has the pod that had the
    device before, and that one is gone. The new one has neither an entry nor a directory while another plugin takes its
    time: it is given as long as if the file had nothing.
    """
    write(node, entry("uid-before", GPUS[0]))
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    await later(node, 25)
    while_it_is_admitted = node.live()
    await later(node, 10)

    assert {"GPU-0": None} == while_it_is_admitted
    assert {} == node.live()


async def test_an_init_container_with_a_late_directory_is_recorded_again(node: Node) -> None:
    """
    An init container whose directory is made late is in the record again. The kubelet makes directories only when the
    node's network is ready, and shows init containers nowhere.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node, entry("uid-1", GPUS[0]))
    await later(node, 10)
    without_directory = node.live()
    directories(node, "uid-1")
    await node.device_allocations.reconcile()
    (again,) = node.ledger.state.allocations.values()

    assert {} == without_directory
    assert ({"GPU-0": None}, "uid-1") == (node.live(), again.pod_uid)


async def test_a_pod_whose_directory_is_there_is_never_released_for_it(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node, entry("uid-1", GPUS[0]))
    directories(node, "uid-1")
    await later(node, 3600)

    assert {"GPU-0": None} == node.live()


# A kubelet that does not list a pod which runs


async def test_a_pod_with_a_mounted_volume_keeps_its_record(node: Node) -> None:
    """
    A pod with a mounted volume keeps its record while a new kubelet does not list it. The kubelet has started while its API
    server is away: it lists static pods alone, for as long as that lasts.
    """
    await runs(node, "train", "uid-1", GPUS[0])
    node.kubelet.kubelet += 1
    node.kubelet.shown.clear()
    await later(node, 3600)
    while_it_runs = node.live()
    directories(node, torn_down=("uid-1",))
    await later(node, 5)

    assert {"GPU-0": "train"} == while_it_runs
    assert {} == node.live()


async def test_a_pod_that_the_kubelet_lists_no_more_has_ended(
    node: Node,
) -> None:
    """A pod that this kubelet has listed and lists no more has ended, although its volumes stay."""
    await runs(node, "train", "uid-1", GPUS[0])
    node.kubelet.shown.clear()
    await later(node, 5)

    assert {} == node.live()


# A node that reboots


async def test_what_a_pod_had_before_a_reboot_is_free_although_the_pod_is_there(node: Node) -> None:
    """No container outlives a reboot. Its pod does, and may have ended or been given other devices since."""
    await rebooted_without_checkpoint(node)
    node.kubelet.usage = ()  # it lists no pod that has ended
    with capture_logs() as logs:
        await later(node, 5)

    assert {} == node.live()
    assert [] == [line for line in logs if line["log_level"] == "error"]


async def test_a_container_lost_after_a_reboot_keeps_its_record(node: Node) -> None:
    """
    A container that was admitted after a reboot, and whose devices the kubelet has lost since, keeps its record, although no
    poll has shown them together. A kubelet that has settled lists no other container without devices.
    """
    await rebooted_without_checkpoint(node)
    with capture_logs() as logs:
        await later(node, 3600)
    kept, allocation = node.live(), node.allocation(GPUS[0])
    directories(node)
    await later(node, 5)

    assert ({"GPU-0": "train"}, "another boot", "uid-1") == (kept, allocation.boot, allocation.pod_uid)
    assert ["the kubelet has lost"] == [line["event"][:20] for line in logs if line["log_level"] == "error"]
    assert {} == node.live()


async def test_a_container_not_admitted_yet_after_a_reboot_is_not_lost() -> None:
    """A kubelet that settles lists containers that it has not given devices yet: nothing is lost, and none is displaced."""
    node = Node(settle_seconds=30)
    directories(node)
    await rebooted_without_checkpoint(node)
    with capture_logs() as logs:
        await later(node, 20)
        waiting = node.live()
        await node.device_allocations.allocate(GPU, [[GPUS[1]]])
        node.kubelet.usage = ()
        show(node, "train", "uid-1", GPUS[1])
        write(node, entry("uid-1", GPUS[1]))
        await later(node, 60)

    assert {"GPU-0": "train"} == waiting
    assert {"GPU-1": "train"} == node.live()
    assert not any("has lost" in line["event"] for line in logs)


async def rebooted_without_checkpoint(node: Node) -> None:
    """A pod ran, the node rebooted, and the kubelet has written its checkpoint without the pod since."""
    await runs(node, "train", "uid-1", GPUS[0])
    node.boot = "another boot"
    node.restart()
    node.kubelet.kubelet += 1
    node.kubelet.shown.clear()
    node.kubelet.usage = (ContainerUsage(owner=owner("train")),)
    write(node)


# A kubelet that has lost count


# A kubelet that is asked before an Allocate


@pytest.mark.parametrize("how", ["shown", "written"])
async def test_what_a_kubelet_told_for_a_preference_counts_later(node: Node, how: str) -> None:
    """
    What a kubelet has shown or written when it was asked for a preference, and drops before the next regular poll, has
    ended. It is not lost, although its pod has no volume and is not deleted.
    """
    await runs(node, "train", "uid-1", GPUS[0])
    node.kubelet.kubelet += 1
    if how == "written":
        write(node, entry("uid-1", GPUS[0]))
        node.kubelet.shown.clear()  # the kubelet has not listed it yet, and has it from its checkpoint
    await node.device_allocations.prefer(GPU, GPUS, [], 1)
    node.kubelet.shown.clear()
    write(node)
    await later(node, 10)

    assert {} == node.live()


# A kubelet that has lost its checkpoint


async def lost(node: Node) -> None:
    """The kubelet stops, its checkpoint is removed, it starts: it lists its pods, and no devices."""
    node.kubelet.kubelet += 1
    node.kubelet.shown.clear()
    node.kubelet.usage = tuple(ContainerUsage(owner=used.owner) for used in node.kubelet.usage)
    write(node)


async def test_a_container_that_the_kubelet_has_lost_keeps_its_record(
    node: Node,
) -> None:
    """A container whose devices the kubelet has lost keeps its record while its pod is there."""
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)
    with capture_logs() as logs:
        await later(node, 3600)
    kept = node.live()
    directories(node)
    await later(node, 5)

    assert {"GPU-0": "x1"} == kept
    assert {} == node.live()
    said = [line for line in logs if line["log_level"] == "error"]
    assert [(["default/x1 main"], ["GPU-0"])] == [(line["containers"], line["devices"]) for line in said]


async def test_what_a_kubelet_wrote_and_dropped_later_has_ended(node: Node) -> None:
    """What a kubelet wrote down and dropped later has ended and is not lost."""
    await runs(node, "pod-a", "uid-a", GPUS[0])
    node.restart()
    node.kubelet.shown.clear()  # it ended while no agent ran; it is not deleted, and has no volume
    await node.device_allocations.reconcile()
    assert len(node.ledger.state.allocations) == 1, "the checkpoint keeps it"

    write(node)
    await later(node, 30)

    assert not node.ledger.state.allocations


async def test_what_is_left_of_a_record_ends_with_its_pod(
    node: Node,
) -> None:
    """Its checkpoint had the pod when a part of it was given on, and loses it with the next write."""
    await runs(node, "pod-a", "uid-a", GPUS[0], GPUS[1])
    node.kubelet.shown.clear()  # it ended, is not deleted, and has no volume
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[2]]])
    assert "pod-a" == node.live()["GPU-1"]

    write(node, entry("uid-b", GPUS[0], GPUS[2]))
    show(node, "pod-b", "uid-b", GPUS[0], GPUS[2])
    await later(node, 30)

    assert {"GPU-0,GPU-2": "pod-b"} == node.live()


async def test_who_was_displaced_is_recorded_again_when_the_other_makes_way(node: Node) -> None:
    """Who was displaced is in the record again when a part of the other record makes way."""
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[2]]])
    await node.device_allocations.allocate(
        GPU, [[GPUS[2]]]
    )  # nothing came of the first: the kubelet gives on what it had
    back = node.live()
    again = (await node.device_allocations.allocate(GPU, [[GPUS[0]]]))[0]

    assert "x1" == back["GPU-0"]
    assert ["x1"] == [former.owner.pod for former in again.displaced]


async def test_two_that_were_displaced_from_a_device_are_told_of_again(node: Node) -> None:
    """The kubelet lost its checkpoint twice; the pod that got the device last was refused after Allocate."""
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)
    await runs(node, "x2", "uid-2", GPUS[0])
    await lost(node)
    (last,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node)
    await later(node, 30)

    (back,) = node.ledger.state.allocations.values()
    assert ["x2", "x1"] == [former.owner.pod for former in last.displaced]
    assert back.owner == owner("x2")
    assert ["x1"] == [former.owner.pod for former in back.displaced]
    directories(node, "uid-1")
    await later(node, 30)
    assert {"GPU-0": "x1"} == node.live()


async def test_a_container_given_other_devices_leaves_its_former_ones(node: Node) -> None:
    """Its kubelet died with its checkpoint before it ran, and the next one admits it once more."""
    await runs(node, "pod-a", "uid-a", GPUS[0], GPUS[1])
    await lost(node)
    await node.device_allocations.allocate(GPU, [[GPUS[1], GPUS[2]]])
    write(node, entry("uid-a", GPUS[1], GPUS[2]))
    show(node, "pod-a", "uid-a", GPUS[1], GPUS[2])
    await later(node, 30)

    assert {"GPU-1,GPU-2": "pod-a"} == node.live()
    assert all(not each.displaced for each in node.ledger.state.allocations.values())


async def test_an_entry_of_another_kubelet_tells_nothing_of_this_one(node: Node) -> None:
    """The next kubelet has not written it, so that without it a container that runs may be lost."""
    await runs(node, "pod-a", "uid-a", GPUS[0])
    node.kubelet.kubelet += 1
    node.kubelet.shown.clear()
    await node.device_allocations.reconcile()
    write(node)
    await later(node, 3600)

    assert {"GPU-0": "pod-a"} == node.live()


async def api_server_is_away(node: Node) -> None:
    """A kubelet has started, writes its checkpoint as plugins register, and lists no pod but a static one."""
    node.kubelet.kubelet = 2
    node.kubelet.since = node.clock.wall()
    node.kubelet.usage = ()
    node.kubelet.shown.clear()
    write(node, *node.kubelet.parts)
    await later(node, 300)


@pytest.mark.parametrize("what", ["checkpoint", "directories"])
async def test_an_unreadable_poll_releases_nothing_that_was_waited_for(what: str) -> None:
    """A disk that stalls for a second is no evidence against a pod that was waited for until now."""
    node = Node(settle_seconds=120)
    directories(node)
    await runs(node, "pod-a", "uid-a", GPUS[0])
    await api_server_is_away(node)
    kubelet = node.kubelet
    had = kubelet.checkpoint, kubelet.parts, kubelet.directories
    if what == "checkpoint":
        kubelet.checkpoint = None
        kubelet.parts = ()
    else:
        kubelet.directories = None
    await later(node, 600)
    meanwhile = node.live()
    kubelet.checkpoint, kubelet.parts, kubelet.directories = had
    directories(node)  # it is deleted
    await later(node, 300)

    assert ({"GPU-0": "pod-a"}, {}) == (meanwhile, node.live())


@pytest.mark.parametrize("restarts", [False, True])
async def test_unreadable_polls_release_nothing_that_the_kubelet_lost(restarts: bool) -> None:
    """Neither one of them after a start of the agent, nor two that lie an hour apart."""
    node = Node(settle_seconds=120)
    directories(node)
    await runs(node, "pod-a", "uid-a", GPUS[0])
    await lost(node)
    if restarts:
        node.restart()
    await later(node, 600)
    known = node.kubelet.directories
    for _ in range(2):
        node.kubelet.directories = None
        await node.device_allocations.reconcile()
        node.kubelet.directories = known
        await later(node, 3600)

    assert {"GPU-0": "pod-a"} == node.live()


async def test_a_grant_that_the_disk_refuses_leaves_nothing_to_the_next_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ids are used again, and what is known of the record that made way belongs to none of them."""

    def refuse(entry: object) -> None:
        raise StateFault("the disk is full", "make room")

    await runs(node, "pod-a", "uid-a", GPUS[0], GPUS[1])
    node.kubelet.shown.clear()
    with monkeypatch.context() as disk, pytest.raises(StateFault):
        disk.setattr(node.journal, "append", refuse)
        await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    await node.device_allocations.allocate(GPU, [[GPUS[5]]])
    await node.device_allocations.allocate(GPU, [[GPUS[6]]])
    ended = {device for each in await node.device_allocations.ended() for device in each.device_ids}

    assert ended.isdisjoint({GPUS[5], GPUS[6]})


async def test_a_preference_avoids_what_the_record_holds(node: Node) -> None:
    """A preference avoids what the record holds, whatever the kubelet takes for free."""
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)
    alone = await node.device_allocations.prefer(GPU, GPUS, (), 1)
    all_others = await node.device_allocations.prefer(GPU, GPUS, (), 7)
    last_resort = await node.device_allocations.prefer(GPU, GPUS, (), 8)
    required = await node.device_allocations.prefer(GPU, GPUS, (GPUS[0],), 2)

    assert GPUS[0] not in alone
    assert GPUS[1:] == all_others
    assert GPUS == last_resort
    assert GPUS[0] in required


async def test_a_held_device_is_preferred_last(node: Node) -> None:
    """A held device is preferred last, and all that are not held before it."""
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)

    assert {GPUS[0], GPUS[5]} == set(await node.device_allocations.prefer(GPU, (GPUS[0], GPUS[5]), (), 2))
    assert (GPUS[5],) == await node.device_allocations.prefer(GPU, (GPUS[0], GPUS[5]), (), 1)


async def test_a_preference_counts_what_an_ended_container_had_as_free(
    node: Node,
) -> None:
    """
    A preference counts what a container had that has ended as free before the record does. As the next moment would: else
    two predictions of one pod differ by when they are made.
    """
    empty = Node(placement="simple")
    expected = await empty.device_allocations.prefer(GPU, GPUS, (), 2)
    node = Node(placement="simple")
    await bound(node, "ended", *expected)
    node.kubelet.shown.clear()

    assert expected == await node.device_allocations.prefer(GPU, GPUS, (), 2)
    assert {",".join(expected): "ended"} == node.live(), "it is released by its own rules"


@pytest.mark.parametrize(("version", "seconds"), [(0, 2.0), (1, 0.0)], ids=["not written", "written"])
async def test_a_grant_counts_from_the_moment_at_which_the_kubelet_asked(version: int, seconds: float) -> None:
    """
    PodResources answers after 3 s. What the kubelet has not written down 5 s after it asked, or in a checkpoint that it has
    written since, belongs to a pod that it refused.
    """
    node = Node(placement="simple")
    await bound(node, "former", GPUS[0])
    node.kubelet.shown.clear()

    async def answer_late() -> None:
        node.kubelet.version = version
        await node.clock.advance(3.0)

    node.kubelet.meanwhile = answer_late
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    preferred = []
    for passed in (seconds / 2, seconds / 2):
        await node.clock.advance(passed)
        preferred.append(await node.device_allocations.prefer(GPU, (GPUS[0], GPUS[5]), (), 1))

    assert [(GPUS[5] if seconds else GPUS[0],), (GPUS[0],)] == preferred


async def test_a_displaced_container_keeps_its_device_from_preferences(
    node: Node,
) -> None:
    """
    A displaced container keeps its device from preferences, also when the one that displaced it has ended. The second pod
    was refused after Allocate: its record is over, and the first one's container runs on.
    """
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node, entry("uid-3", GPUS[7]))
    directories(node, "uid-1")

    assert (GPUS[5],) == await node.device_allocations.prefer(GPU, (GPUS[0], GPUS[5]), (), 1)
    assert {GPUS[0], GPUS[5]} == set(await node.device_allocations.prefer(GPU, (GPUS[0], GPUS[5]), (), 2))


async def test_preferences_that_are_asked_for_at_once_share_a_poll(node: Node) -> None:
    """
    Preferences that are asked for at once share one poll of the kubelet. PodResources answers a hundred questions a second
    and refuses more (kubelet v1.36.3): the record needs some.
    """
    await runs(node, "train", "uid-1", GPUS[0])
    before = node.kubelet.asked
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(node.device_allocations.prefer, GPU, GPUS, (), 1)

    assert node.kubelet.asked - before in (1, 2), "one more for those who asked while the first was under way"


async def test_a_preference_does_not_wait_for_a_kubelet_that_is_away(node: Node) -> None:
    await runs(node, "x1", "uid-1", GPUS[0])
    node.kubelet.answering = False

    assert (GPUS[5],) == await node.device_allocations.prefer(GPU, (GPUS[0], GPUS[5]), (), 1)


async def test_allocate_over_a_container_not_seen_to_end_names_both_owners(
    node: Node,
) -> None:
    """Allocate over a container that was not seen to end names both owners until one is gone."""
    await runs(node, "x1", "uid-1", GPUS[0])
    first = node.allocation(GPUS[0]).id
    await lost(node)
    with capture_logs() as logs:
        (second,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
        write(node, entry("uid-2", GPUS[0]))
        show(node, "x2", "uid-2", GPUS[0])
        directories(node, "uid-1", "uid-2")
        await node.device_allocations.reconcile()

    displaced = (Displaced(allocation=first, owner=owner("x1"), pod_uid="uid-1", devices={GPU: (GPUS[0],)}),)
    assert displaced == second.displaced == node.said(AllocationGranted)[-1].allocation.displaced
    assert [(first, "displaced")] == [(event.allocation, event.reason) for event in node.said(AllocationReleased)]
    (told,) = (event for event in node.said(AllocationBound) if event.allocation == second.id)
    assert (owner("x2"), "uid-2", displaced) == (told.owner, told.pod_uid, told.displaced), "both owners in one event"
    errors = [line for line in logs if line["log_level"] == "error"]
    assert [[f"default/x1 main ({first})"]] == [line["held_by"] for line in errors if "held_by" in line]
    await later(node, 3600)
    assert displaced == node.allocation(GPUS[0]).displaced

    directories(node, "uid-2")
    await node.device_allocations.reconcile()
    assert () == node.allocation(GPUS[0]).displaced
    assert {"GPU-0": "x2"} == node.live()
    assert node.ledger.state.digest == replay(node.ledger.node, [e for e, _ in node.ledger.pending]).digest


async def test_a_displaced_container_has_its_record_back_in_the_end(node: Node) -> None:
    """A displaced container has its record back when the other one has ended."""
    await runs(node, "x1", "uid-1", GPUS[0], GPUS[1])
    await lost(node)
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    rest = node.live()
    write(node, entry("uid-2", GPUS[0]))
    show(node, "x2", "uid-2", GPUS[0])
    directories(node, "uid-1", "uid-2")
    await node.device_allocations.reconcile()
    node.restart()  # what was displaced is in the record, and not in the memory of a process
    await node.device_allocations.reconcile()
    node.kubelet.shown.clear()
    node.kubelet.usage = node.kubelet.usage[:1]
    directories(node, "uid-1")
    await later(node, 5)

    assert {"GPU-0": None, "GPU-1": "x1"} == rest, "it keeps what was not taken"
    assert {"GPU-0": "x1", "GPU-1": "x1"} == node.live()
    assert ["uid-1", "uid-1"] == [held.pod_uid for held in node.ledger.state.allocations.values()]
    assert "AllocationReleased AllocationGranted" == " ".join(
        type(event).__name__ for event in node.journal.load()[-1].events
    ), "in one entry of the journal"


async def test_who_displaces_the_displacer_displaces_them_all(node: Node) -> None:
    await runs(node, "x1", "uid-1", GPUS[0])
    for number in (2, 3):
        await lost(node)
        (given,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
        write(node, entry(f"uid-{number}", GPUS[0]))
        show(node, f"x{number}", f"uid-{number}", GPUS[0])
        directories(node, *(f"uid-{n}" for n in range(1, number + 1)))
        await node.device_allocations.reconcile()

    assert {"x1", "x2"} == {former.owner.pod for former in given.displaced}


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_container_lost_right_after_a_reboot_is_displaced(node: Node, is_listed: bool) -> None:
    """
    A container whose pod is there may be admitted with its former devices already after a reboot, although no poll has shown
    that before the checkpoint was lost. Once it has others it did not run.
    """
    await rebooted_without_checkpoint(node)
    if not is_listed:  # not yet, by a kubelet that has just started
        node.kubelet.usage = ()
    (given,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node, entry("uid-2", GPUS[0]))
    show(node, "x2", "uid-2", GPUS[0])
    directories(node, "uid-1", "uid-2")
    await node.device_allocations.reconcile()
    told = node.allocation(GPUS[0]).displaced
    write(node, entry("uid-1", GPUS[1]), entry("uid-2", GPUS[0]))
    show(node, "train", "uid-1", GPUS[1])
    await later(node, 5)

    assert [owner("train")] == [former.owner for former in given.displaced]
    assert told == given.displaced
    assert ["displaced"] == [event.reason for event in node.said(AllocationReleased)]
    assert {"GPU-0": "x2", "GPU-1": "train"} == node.live()
    assert () == node.allocation(GPUS[0]).displaced


async def test_without_directories_a_container_that_is_listed_by_name_runs(node: Node) -> None:
    """Without directories a container that the kubelet lists by name is taken to run."""
    node.kubelet.directories = None
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    show(node, "x1", "", GPUS[0])
    await node.device_allocations.reconcile()
    await lost(node)
    (given,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert [owner("x1")] == [former.owner for former in given.displaced]


@pytest.mark.parametrize("is_lost", [True, False])
async def test_nothing_of_a_pod_that_ended_with_a_reboot_is_displaced(node: Node, is_lost: bool) -> None:
    """
    A pod that runs when the node goes down often fails afterwards, and its directory stays for a while. Its checkpoint
    tells that it is known to the kubelet; where that is lost, the pod has ended when its directory is gone.
    """
    await runs(node, "x1", "uid-1", GPUS[0])
    if is_lost:
        await lost(node)
        directories(node)
    node.boot = "another boot"
    node.restart()
    node.kubelet.kubelet += 1
    node.kubelet.shown.clear()
    node.kubelet.usage = ()
    (given,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert () == given.displaced


async def test_what_was_displaced_before_a_reboot_is_displaced_no_more(node: Node) -> None:
    """Nothing of the former boot runs, although the directory of its pod is still there."""
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    write(node, entry("uid-2", GPUS[0]))
    show(node, "x2", "uid-2", GPUS[0])
    directories(node, "uid-1", "uid-2")
    await node.device_allocations.reconcile()
    before = [each.owner for each in node.allocation(GPUS[0]).displaced]
    node.boot = "another boot"
    node.restart()
    node.kubelet.kubelet += 1
    node.kubelet.shown.clear()
    node.kubelet.usage = ()
    (given,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert ([owner("x1")], ()) == (before, given.displaced)


async def test_what_is_left_of_a_record_has_no_nic_that_is_given_anew() -> None:
    """The next container takes one of its GPUs, and the NIC that had come with them."""
    it, nic = Node(), DeviceID("mlx5_0")
    former = Allocation(
        id=AllocationID("former"),
        devices={GPU: GPUS[:2], NIC: (nic,)},
        co_allocated=(nic,),
        boot=it.boot,
        pod_uid="uid-1",
    )
    write(it, entry("uid-1", *GPUS[:2]))
    listing = await it.kubelet.listing()
    rests = []
    for co_allocated in ((), (nic,)):
        new = Allocation(id=AllocationID("new"), devices={GPU: GPUS[:1], NIC: co_allocated}, co_allocated=co_allocated)
        (rest,) = remainders(it.ledger, [former], [GPUS[:1]], listing, [new])
        rests.append(rest.allocation.devices)

    assert [{GPU: (GPUS[1],), NIC: (nic,)}, {GPU: (GPUS[1],)}] == rests


@pytest.mark.parametrize(
    "how",
    [
        "ended",
        "its directory is still there",
        "and the checkpoint is written anew",
        "ended while the kubelet restarted",
    ],
)
async def test_devices_given_on_after_their_container_ended_displace_nobody(node: Node, how: str) -> None:
    """
    Devices that are given on after their container has ended displace nobody. The next pod may have them at once: the
    kubelet removes the directory of a pod seconds after it has ended.
    """
    await runs(node, "x1", "uid-1", GPUS[0])
    node.kubelet.shown.clear()
    if how == "ended":
        directories(node)
    elif how == "and the checkpoint is written anew":
        write(node)
    elif how == "ended while the kubelet restarted":
        node.kubelet.kubelet += 1  # which has read its checkpoint: it knows of the device, and shows nobody with it
    with capture_logs() as logs:
        (given,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert () == given.displaced
    assert [] == [line for line in logs if line["log_level"] == "error"]
    assert ["superseded"] == [event.reason for event in node.said(AllocationReleased)]


# A pod that is made anew under its name


async def test_a_pod_made_anew_with_the_same_gpus_is_another_allocation(node: Node) -> None:
    """
    A pod that is made anew under its name with the same GPUs is another allocation. Its StatefulSet gives it the same name,
    and the kubelet the same devices; the file is written a moment late.
    """
    await runs(node, "train-0", "uid-1", GPUS[0])
    first = node.allocation(GPUS[0])
    node.kubelet.shown.clear()
    directories(node)
    (second,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    show(node, "train-0", "uid-1", GPUS[0])  # by an entry that is not written anew yet
    await node.device_allocations.reconcile()
    before_it_is_written = node.allocation(GPUS[0]).pod_uid
    node.kubelet.shown.clear()
    write(node, entry("uid-2", GPUS[0]))
    show(node, "train-0", "uid-2", GPUS[0])
    directories(node, "uid-2")
    await later(node, 10)

    live = node.allocation(GPUS[0])
    assert ("uid-1", "", "uid-2") == (first.pod_uid, before_it_is_written, live.pod_uid)
    assert (second.id, owner("train-0"), ()) == (live.id, live.owner, live.displaced)
    assert [(first.id, "superseded")] == [(e.allocation, e.reason) for e in node.said(AllocationReleased)]
    assert 2 == len(node.said(AllocationGranted))


async def test_a_pod_made_anew_under_another_plugin_is_recorded_anew(node: Node) -> None:
    """
    A pod that was made anew while another plugin served it is recorded anew. Nobody asked us: its name and its devices are
    those of the record, and its UID is not.
    """
    await runs(node, "train-0", "uid-1", GPUS[0])
    first = node.allocation(GPUS[0]).id
    node.kubelet.shown.clear()
    write(node, entry("uid-2", GPUS[0]))
    show(node, "train-0", "uid-2", GPUS[0])
    directories(node, "uid-2")
    node.restart()
    await node.device_allocations.reconcile()
    await node.clock.advance(APART_SECONDS / 2)
    await node.device_allocations.reconcile()
    after_half_a_second = node.allocation(GPUS[0]).id
    await node.clock.advance(APART_SECONDS / 2)
    await node.device_allocations.reconcile()

    live = node.allocation(GPUS[0])
    assert first == after_half_a_second, "the polls may have been between two states of the kubelet"
    assert live.id != first
    assert (owner("train-0"), "uid-2") == (live.owner, live.pod_uid)
    assert {"GPU-0": "train-0"} == node.live()


async def test_a_pod_made_anew_with_other_gpus_is_told_apart_from_the_one_before(node: Node) -> None:
    await runs(node, "train-0", "uid-1", GPUS[0])
    node.kubelet.shown.clear()
    directories(node)
    await runs(node, "train-0", "uid-2", GPUS[4])

    assert {"uid-1", "uid-2"} == {held.pod_uid for held in node.ledger.state.allocations.values()}
    await later(node, 5)
    assert ["uid-2"] == [held.pod_uid for held in node.ledger.state.allocations.values()]


# What explain says of a pod that holds nothing


async def explained(node: Node, target: str) -> Explained:
    bus = MemoryBus()
    admissions = Admissions(node.ledger, bus, AdmissionRules(), kubelet_owns_devices=True)
    return await admissions.explain(ExplainRequest(node=node.ledger.node, target=target))


async def test_explain_names_the_successor_of_a_superseded_allocation(node: Node) -> None:
    """A pod of which the node knows nothing is not found: it was refused, or asked for no device."""
    await runs(node, "first", "uid-1", GPUS[0])
    superseded = node.allocation(GPUS[0]).id
    node.kubelet.shown.clear()
    directories(node)
    await runs(node, "second", "uid-2", GPUS[0])
    former = await explained(node, "default/first")
    with pytest.raises(NotFound) as refused:
        await explained(node, "default/refused")

    assert (
        f"default/first main had GPU-0 (allocation {superseded}, pod UID uid-1), and no longer holds it: the kubelet "
        f"allocated its devices again (allocation {node.allocation(GPUS[0]).id})",
    ) == former.notes
    assert former.notes == (await explained(node, superseded)).notes
    assert "no allocation or pod named 'default/refused'" == refused.value.finding
    assert "kubectl describe pod" in refused.value.remedy


async def test_explain_tells_the_pods_of_one_name_apart(node: Node) -> None:
    """A StatefulSet's: the one that lives, and how the one before it ended."""
    await runs(node, "train-0", "uid-1", GPUS[0])
    node.kubelet.shown.clear()
    directories(node)
    await runs(node, "train-0", "uid-2", GPUS[0])
    told = await explained(node, "default/train-0")

    assert ["uid-2"] == [held.pod_uid for held in told.allocations]
    assert ["pod UID uid-1" in note for note in told.notes] == [True]


def test_no_more_endings_are_remembered_than_can_be_told() -> None:
    endings = ReleaseLog()
    live = {AllocationID(str(n)): Allocation(id=AllocationID(str(n)), owner=owner("p")) for n in range(REMEMBERED + 5)}
    gone = [
        AllocationReleased(node=NODE, epoch=1, seq=n, allocation=name, reason="gone") for n, name in enumerate(live, 1)
    ]
    endings.note(live, gone)

    assert () == endings.explain("4")
    assert 1 == len(endings.explain("5"))
    assert MOST_EXPLAINED == len(endings.explain("default/p"))


# Readiness


async def test_readiness_and_a_metric_name_both_containers_of_a_device(node: Node) -> None:
    """Readiness and a metric name both containers of a device until one is gone."""
    await runs(node, "x1", "uid-1", GPUS[0])
    await lost(node)
    await runs(node, "x2", "uid-2", GPUS[0])
    bus = MemoryBus()
    admissions = Admissions(node.ledger, bus, AdmissionRules(), kubelet_owns_devices=True)
    hardware_watch = HardwareWatch(node.ledger, bus, node.clock)
    allocator = Allocator(node.ledger, bus, hardware_watch, admissions, node.device_allocations, reconcile_seconds=5)
    metrics = registry_of(figures(allocator, lambda: 0, lambda: 0))
    reason = allocator.devices_given_twice()
    counted = metrics.get_sample_value("topoalign_allocator_displaced_allocations")
    directories(node, "uid-2")
    await node.device_allocations.reconcile()

    assert (
        "devices that two containers have: GPU-0 (default/x1 main and default/x2 main); delete one pod of each pair",
        1,
    ) == (reason, counted)
    assert (None, 0) == (
        allocator.devices_given_twice(),
        metrics.get_sample_value("topoalign_allocator_displaced_allocations"),
    )
