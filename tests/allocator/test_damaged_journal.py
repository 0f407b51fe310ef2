"""A journal that is not as it was written costs no start, no evidence, and no device that somebody may hold."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from device_allocations_support import GPUS, MACHINE, NODE, Node, PassingClock
from faults_support import sample
from structlog.testing import capture_logs

from topoalign.allocator.hardware_watch import mark_unknown
from topoalign.allocator.ledger import journal_format
from topoalign.allocator.ledger.journal import KEPT, FileJournal, open_journal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import ResourceEntry
from topoalign.core.model.errors import DeviceInUse, StateFault
from topoalign.core.model.events import Allocation, AllocationsSnapshot
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import replay
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

TRUTH = {"GPU-0,GPU-1": "a", "GPU-2": None, "GPU-5": "c"}
"""What runs when the journal is damaged: devices -> pod. None: of an init container, which only the checkpoint knows."""
HELD = {devices: [DeviceID(device) for device in devices.split(",")] for devices in TRUTH}


def line(payload: bytes) -> bytes:
    return b"%08x %s\n" % (crc32(payload), payload)


async def lived(directory: Path, *, published: bool = True) -> bytes:
    """A node that has given out and taken back devices, with its journal as it was left."""
    with open_journal(directory, NODE) as journal:
        node = Node(journal)
        for devices in TRUTH:
            await node.device_allocations.allocate(GPU, [HELD[devices]])
        show_truth(node)
        await node.device_allocations.allocate(GPU, [[GPUS[7]]])
        await node.device_allocations.reconcile()
        node.ledger.release([node.allocation(GPUS[7]).id], "gone")
        while published and node.ledger.pending:
            node.ledger.published([node.ledger.pending[0][0]])
    return (directory / "journal").read_bytes()


@contextmanager
def restarted(directory: Path, name: NodeName = NODE) -> Iterator[tuple[Node, FileJournal]]:
    with open_journal(directory, name) as journal:
        node = Node(journal, PassingClock())
        yield node, journal


def show_truth(node: Node) -> None:
    """As the kubelet does, which went on meanwhile."""
    for devices, pod in TRUTH.items():
        if pod is not None:
            node.kubelet.show(pod, *HELD[devices])
    node.kubelet.parts = tuple(ResourceEntry(GPU, frozenset(held)) for held in HELD.values())
    node.kubelet.checkpoint = frozenset((GPU, device) for held in HELD.values() for device in held)


def damages(whole: bytes) -> dict[str, bytes]:
    """The journal damaged in every way that is told apart."""
    header, *lines = whole.splitlines(keepends=True)
    later = b'{"type":"topoalign.journal","version":2,"node":"node-1","sealed":true}'
    other = b'{"type":"topoalign.journal","version":1,"node":"node-2"}'
    unknown = b'{"time":1.0,"events":[{"type":"AllocationSplit","node":"node-1","epoch":1,"seq":9}]}'
    return {
        "empty": b"",
        "only a header": header,
        "newer version": line(later) + b"".join(lines),
        "other node": line(other) + b"".join(lines),
        "trailing text": whole + line(b'{"time":1.0,"events":[]} and more'),
        "trailing line": whole + b"and more\n",
        "unknown fact": whole + line(unknown),
        "a fact of another node": b"".join([header, *lines[:-1], line(lines[-1][9:-1].replace(b"node-1", b"node-2"))]),
        "a line is missing": header + b"".join(lines[:2] + lines[3:]),
        "the end is missing": header + b"".join(lines[:3]),
        "no newline at all": b"\xff" * 4096,
        "zeros": whole[:-200] + bytes(200),
        "one line twice": whole + lines[-1],
        "deep": whole + line(b"[" * 100_000),
        "not UTF-8": whole + line(b'{"time":1.0,"events":["\xff\xfe"]}'),
    }


@pytest.mark.parametrize("kind", damages(line(b"") * 8))
async def test_a_damaged_journal_is_set_aside_and_the_kubelet_completes_it(tmp_path: Path, kind: str) -> None:
    """A damaged journal is set aside as it was, and the kubelet makes the record whole."""
    whole = await lived(tmp_path)
    damaged = damages(whole)[kind]
    (tmp_path / "journal").write_bytes(damaged)
    with capture_logs() as logs, restarted(tmp_path) as (node, journal):
        assert ["the journal is damaged"] == [log["event"] for log in logs if log["log_level"] == "error"]
        assert [tmp_path / "journal.corrupt-1"] == journal.set_aside
        assert damaged == journal.set_aside[0].read_bytes()
        assert node.ledger.unconfirmed is not None
        show_truth(node)
        await node.device_allocations.reconcile()

        assert node.ledger.unconfirmed is None
        assert set(TRUTH) <= set(node.live()) <= {*TRUTH, "GPU-7"}, "of what ended, the end may be lost"
        await node.clock.advance(30)
        await node.device_allocations.reconcile()
        assert set(TRUTH) == set(node.live())
    with restarted(tmp_path) as (node, journal):
        assert set(TRUTH) == set(node.live())
        assert (None, 1) == (node.ledger.unconfirmed, len(journal.set_aside))


async def test_no_cut_and_no_flipped_bit_makes_a_held_device_free(tmp_path: Path) -> None:
    """
    No cut and no flipped bit makes a device count as free that may be held. Every cut and every bit, on what is read:
    either all that runs is in the record, or the record is unconfirmed.
    """
    whole = await lived(tmp_path)
    with open_journal(tmp_path, NODE) as journal:
        published = journal.published()
    readings = [whole[:cut] for cut in range(len(whole))]
    flips = [(at, bit) for at in range(len(whole)) for bit in range(8)]
    readings += [flipped(whole, at, bit) for at, bit in flips]
    for content in readings:
        found = journal_format.read_journal(content, NODE, published)
        events = [event for each in found.lines for event in each.entry.events]
        newest = max((at for at, e in enumerate(events) if isinstance(e, AllocationsSnapshot)), default=0)
        held = {
            ",".join(devices)
            for allocation in replay(NODE, events[newest:]).allocations.values()
            for devices in allocation.devices.values()
        }
        assert found.unconfirmed is not None or set(TRUTH) <= held, content


async def test_a_last_line_that_lost_its_end_is_damage(tmp_path: Path) -> None:
    """
    A last line that lost its end is damage, and not an append that was cut short. One bit turns the end of the line into
    another character; the entry before it is whole, and was answered.
    """
    whole = await lived(tmp_path)
    damaged, unfinished = whole[:-1] + b"\x1a", whole[:-2]

    assert None is not journal_format.read_journal(damaged, NODE, None).unconfirmed
    assert None is journal_format.read_journal(unfinished, NODE, None).unconfirmed
    assert journal_format.read_journal(unfinished, NODE, None).unfinished


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


@pytest.mark.timeout(900)
async def test_an_allocator_starts_on_any_cut_or_flipped_journal(
    tmp_path: Path,
) -> None:
    """An allocator starts on any cut or flipped journal, and agrees with the kubelet after one poll."""
    whole = await lived(tmp_path / "lived")
    cuts = [whole[:cut] for cut in sample(range(len(whole)), 30)]
    places = [(at, bit) for at in range(len(whole)) for bit in range(8)]
    for number, content in enumerate([*cuts, *(flipped(whole, at, bit) for at, bit in sample(places, 40))]):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "lived", directory)
        (directory / "journal").write_bytes(content)
        with restarted(directory) as (node, journal):
            assert [content] * (content not in (whole, b"")) == [p.read_bytes() for p in journal.set_aside if content]
            show_truth(node)
            if node.ledger.unconfirmed is not None:
                with pytest.raises(DeviceInUse):
                    await node.device_allocations.allocate(GPU, [[GPUS[5], GPUS[6]]])
            await node.device_allocations.reconcile()
            assert node.ledger.unconfirmed is None
            assert set(TRUTH) <= set(node.live())
        shutil.rmtree(directory)


async def test_an_unconfirmed_record_asks_the_kubelet_before_it_gives(tmp_path: Path) -> None:
    """While the record is unconfirmed, nothing is handed out before the kubelet has been asked."""
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"")
    with restarted(tmp_path) as (node, _):
        show_truth(node)
        node.kubelet.answering = False
        with pytest.raises(Exception, match="PodResources does not answer"):
            await node.device_allocations.allocate(GPU, [[GPUS[3]]])
        node.kubelet.answering = True
        await node.device_allocations.allocate(GPU, [[GPUS[3]]])

        assert {*TRUTH, "GPU-3"} == set(node.live())
        assert node.ledger.unconfirmed is None


async def test_hardware_that_discovery_has_not_confirmed_confirms_no_record(tmp_path: Path) -> None:
    """
    An allocator that starts while discovery is silent believes the newest topology of the stream. That may be a forged one
    without devices, by which nothing that the kubelet shows, and nothing in its checkpoint, is ours.
    """
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"")
    with open_journal(tmp_path, NODE) as journal:
        node = Node(journal)
        show_truth(node)
        healthy = node.ledger.state.health
        assert healthy is not None
        node.topology = Topology()
        node.hear_topology(node.ledger, 2)
        node.ledger.take_reading(mark_unknown(healthy, "discovery has not confirmed the health of the devices"))
        await node.device_allocations.reconcile()

        assert {} == node.live()
        assert node.ledger.unconfirmed is not None

        node.topology = MACHINE
        node.hear_topology(node.ledger, 3)
        node.ledger.take_reading(healthy)
        await node.device_allocations.allocate(GPU, [[GPUS[3]]])

        assert {**TRUTH, "GPU-3": None} == node.live()
        assert node.ledger.unconfirmed is None


async def test_unconfirmed_hardware_keeps_what_is_shown_and_nothing_unshown(tmp_path: Path) -> None:
    """What the checkpoint alone has waits for discovery: should its container have ended, nobody would tell the record."""
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"")
    with restarted(tmp_path) as (node, _):
        show_truth(node)
        healthy = node.ledger.state.health
        assert healthy is not None
        node.ledger.take_reading(mark_unknown(healthy, "discovery has not confirmed the health of the devices"))
        await node.device_allocations.reconcile()

        assert {devices: pod for devices, pod in TRUTH.items() if pod is not None} == node.live()
        assert node.ledger.unconfirmed is not None


async def test_without_a_checkpoint_a_settled_kubelet_confirms_the_record(tmp_path: Path) -> None:
    """
    Without a checkpoint, an unconfirmed record is confirmed only once the kubelet has settled. It has just started and
    lists few pods; its checkpoint, which would tell, cannot be read.
    """
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"")
    with restarted(tmp_path) as (node, _):
        node.kubelet.since, node.kubelet.checkpoint = node.clock.wall(), None
        with pytest.raises(StateFault, match="unconfirmed"):
            await node.device_allocations.allocate(GPU, [[GPUS[5]]])
        await node.clock.advance(120)
        node.kubelet.show("c", GPUS[5])
        with pytest.raises(DeviceInUse):
            await node.device_allocations.allocate(GPU, [[GPUS[5], GPUS[6]]])

        assert node.ledger.unconfirmed is None


async def test_after_damage_before_the_newest_snapshot_the_record_is_whole(tmp_path: Path) -> None:
    """The snapshot says all that was held; only facts that the bus has not received are lost, and it stands in for them."""
    await lived(tmp_path, published=False)
    with restarted(tmp_path) as (node, _):
        held = node.live()
    content = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(flipped(content, content.index(b"GPU-2"), 0))
    with restarted(tmp_path) as (node, journal):
        assert held == node.live()
        assert (None, 1) == (node.ledger.unconfirmed, len(journal.set_aside))
        assert isinstance(node.ledger.pending[-1][0], AllocationsSnapshot)


async def test_a_journal_that_the_disk_cannot_read_is_set_aside_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lived(tmp_path)

    def unreadable(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("topoalign.allocator.ledger.journal.open", unreadable, raising=False)
        with restarted(tmp_path) as (node, journal):
            assert "the disk cannot read it" == node.ledger.unconfirmed
            assert 1 == len(journal.set_aside)
            show_truth(node)
            await node.device_allocations.reconcile()
            assert set(TRUTH) == set(node.live())


async def test_a_record_stays_unconfirmed_over_restarts(tmp_path: Path) -> None:
    """A record stays unconfirmed over restarts until somebody confirms it."""
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"")
    for _ in range(3):
        with restarted(tmp_path) as (node, journal):
            assert node.ledger.unconfirmed is not None
            assert 1 == len(journal.set_aside)


@pytest.mark.parametrize("mark", ["published", "never published", "not readable"])
async def test_a_journal_missing_from_a_used_directory_is_unconfirmed(tmp_path: Path, mark: str) -> None:
    """
    A record whose journal has gone from a directory that was used is unconfirmed. What the bus has received is marked only
    once there is a journal, so the mark alone tells, whatever it says.
    """
    await lived(tmp_path, published=mark == "published")
    (tmp_path / "journal").unlink()
    if mark == "not readable":
        (tmp_path / "published").write_text("not numbers")
    with restarted(tmp_path) as (node, journal):
        assert node.ledger.unconfirmed is not None
        assert "missing" in node.ledger.unconfirmed
        assert [] == journal.set_aside


async def test_what_was_set_aside_is_never_overwritten(tmp_path: Path) -> None:
    """What was set aside is never overwritten, and the newest few are kept."""
    for number in range(1, KEPT + 4):
        await lived(tmp_path)
        (tmp_path / "journal").write_bytes(b"damage %d" % number)
    with restarted(tmp_path) as (_, journal):
        last = KEPT + 3
        assert [b"damage %d" % n for n in range(last - KEPT + 1, last + 1)] == [
            path.read_bytes() for path in journal.set_aside
        ]
        assert f"journal.corrupt-{last}" == journal.set_aside[-1].name


async def test_a_start_cut_short_sets_the_same_file_aside_once(tmp_path: Path) -> None:
    """A start that was cut short after setting a file aside sets the same file aside once."""
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"damage")
    os.link(tmp_path / "journal", tmp_path / "journal.corrupt-1")
    with restarted(tmp_path) as (_, journal):
        assert [b"damage"] == [path.read_bytes() for path in journal.set_aside]


async def test_a_start_cut_short_before_the_first_fact_sets_nothing_aside_again(tmp_path: Path) -> None:
    """
    A start that was cut short before the first fact sets nothing aside again. What was published is newer than anything in
    the journal that was begun, which says already that it is unconfirmed.
    """
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"damage")
    for _ in range(3):
        with open_journal(tmp_path, NODE) as journal:
            journal.load()

            assert journal.unconfirmed is not None
            assert [b"damage"] == [path.read_bytes() for path in journal.set_aside]


async def test_damage_before_a_snapshot_does_not_confirm_a_record(tmp_path: Path) -> None:
    """Damage to what a snapshot stands for does not confirm a record that was unconfirmed before."""
    await lived(tmp_path)
    (tmp_path / "journal").write_bytes(b"damage")
    with restarted(tmp_path) as (node, _):
        await node.clock.advance(2)
        node.ledger.announce()
    header, _, snapshot = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal").write_bytes(b"".join([header, b"damage\n", snapshot]))
    with restarted(tmp_path) as (node, journal):
        assert 2 == len(journal.set_aside)
        assert node.ledger.unconfirmed is not None


async def test_an_epoch_without_the_snapshot_that_it_began_with_is_damage(tmp_path: Path) -> None:
    await lived(tmp_path, published=False)
    with restarted(tmp_path) as (node, _):
        await node.device_allocations.allocate(GPU, [[GPUS[3]]])
    *others, snapshot, granted = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    assert b"AllocationsSnapshot" in snapshot
    (tmp_path / "journal").write_bytes(b"".join([*others, granted]))
    with restarted(tmp_path) as (node, _):
        assert node.ledger.unconfirmed is not None
        assert TRUTH == node.live()


async def test_a_new_epoch_is_above_all_that_was_published(
    tmp_path: Path,
) -> None:
    """
    A new epoch is above all that was published, although the journal and the clock are lost. Else new facts would bear old
    numbers, and every listener would drop them as repetitions. One fact more may have been published than is marked, and it
    may have been the first of the epoch after.
    """
    await lived(tmp_path)
    with open_journal(tmp_path, NODE) as journal:
        before = journal.published()
        assert before is not None
    (tmp_path / "journal").write_bytes(b"")
    with open_journal(tmp_path, NODE) as journal:
        ledger = Ledger(NODE, journal, ManualClock(now=1.0))

        assert ledger.state.epoch > before[0] + 1


async def test_the_record_does_not_depend_on_the_policy_that_it_was_made_under(tmp_path: Path) -> None:
    """What was given stays given, whatever policy decides from now on: the record says nothing of policies."""
    await lived(tmp_path)
    with open_journal(tmp_path, NODE) as journal:
        node = Node(journal, placement="static-dgx2")

        assert TRUTH == node.live()
        assert None is node.ledger.unconfirmed


PRESENT = (
    b'70148508 {"type":"topoalign.journal","version":1,"node":"node-1"}\n'
    b'ae16ebec {"time":1.5,"events":[{"type":"AllocationsSnapshot","node":"node-1","epoch":7,"seq":1,'
    b'"allocations":[{"id":"7-1","owner":{"namespace":"ml","pod":"train","container":"main"},'
    b'"devices":{"nvidia.com/gpu":["GPU-0","GPU-1"]},"cpus":"0-3","memory":[{"resource":"memory","nodes":[0],'
    b'"size":1024,"taken":[1024]}],"affinity":[0]}],"memory":{"0":{"reserved":{"memory":1024},"cells":[0],'
    b'"assignments":1}},"digest":"0123456789abcdef"}]}\n'
    b'174127a0 {"time":2.5,"events":[{"type":"AllocationReleased","node":"node-1","epoch":7,"seq":2,'
    b'"allocation":"7-1","reason":"superseded"},{"type":"AllocationGranted","node":"node-1","epoch":7,"seq":3,'
    b'"allocation":{"id":"7-2","devices":{"nvidia.com/gpu":["GPU-1"]}}},{"type":"AllocationDeviated","node":"node-1",'
    b'"epoch":7,"seq":4,"allocation":"7-2","preferred":["GPU-0"],"allocated":["GPU-1"]}]}\n'
    b'd6c16d99 {"time":3.5,"events":[{"type":"AllocationBound","node":"node-1","epoch":7,"seq":5,"allocation":"7-2",'
    b'"owner":{"namespace":"ml","pod":"eval","container":"main"}},{"type":"AllocationRefused","node":"node-1","epoch":7,'
    b'"seq":6,"namespace":"ml","pod":"big","container":null,"reason":"TopologyAffinityError","code":"TopologyAffinity",'
    b'"finding":"no","remedy":"wait"}]}\n'
)
"""A journal as version 1 wrote it first. It stays readable for ever; this literal is never changed."""


def test_a_journal_of_the_first_release_is_read(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(PRESENT)
    with open_journal(tmp_path, NODE) as journal:
        ledger = Ledger(NODE, journal, ManualClock())

        assert (None, []) == (ledger.unconfirmed, journal.set_aside)
        (live,) = ledger.state.allocations.values()
        assert (AllocationID("7-2"), {GPU: (GPUS[1],)}) == (live.id, live.devices)
        assert live.owner is not None
        assert "eval" == live.owner.pod
    with restarted(tmp_path) as (node, _):
        assert [live] == list(node.ledger.state.allocations.values())
        assert () == node.ledger.state.stale, "in which boot it was given is not known"


def test_fields_that_a_later_version_adds_are_passed_over(tmp_path: Path) -> None:
    header, *entries = PRESENT.splitlines()
    grown = [b'{"color":"red",' + each.partition(b" ")[2][1:] for each in (header, *entries)]
    grown = [each.replace(b'"allocation":{"id"', b'"allocation":{"shape":[1],"id"') for each in grown]
    (tmp_path / "journal").write_bytes(b"".join(map(line, grown)))
    with open_journal(tmp_path, NODE) as journal:
        ledger = Ledger(NODE, journal, ManualClock())

        assert (None, [AllocationID("7-2")]) == (ledger.unconfirmed, list(ledger.state.allocations))


def test_an_allocation_without_the_newest_fields_is_written_as_it_was(tmp_path: Path) -> None:
    """So that the version before this one reads what this one writes."""
    bare = Allocation(id=AllocationID("7-2"), devices={GPU: (GPUS[1],)})

    assert b'{"id":"7-2","devices":{"nvidia.com/gpu":["GPU-1"]}}' == msgspec.json.encode(bare)
