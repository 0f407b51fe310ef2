"""MIG instances that are made for containers: none is left over, none is another's, and none is made twice."""

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import anyio
import pytest
from disk_support import syncs_and_renames
from hypothesis import given, settings
from hypothesis import strategies as st
from instance_support import A100, GIB, GPU, PlayedGpus, place

from topoalign.allocator.mig import instance_log as books
from topoalign.allocator.mig.instance_log import InstanceLog, OwnInstance
from topoalign.allocator.mig.instances import InstanceInUse, Instances, NoPlace, PlaceTaken
from topoalign.core.model.errors import DriverFault, StateFault
from topoalign.core.model.ids import DeviceID


class Killed(BaseException):
    """The process ends here; no handler of an error may go on."""


pytestmark = pytest.mark.anyio

STEPS = (
    "there",
    "intent",
    "gpu instance",
    "compute instance",
    "made",
    "noted",
    "granted",
    "destroy compute instance",
    "destroy gpu instance",
    "destroyed",
    "forgotten",
)


def slot(number: int) -> DeviceID:
    return DeviceID(f"{GPU}::{number}")


class Node:
    """An allocator that ends and starts again, on GPUs that stay."""

    playing: "Node"
    """The newest one."""

    def __init__(self, directory: Path, *foreign: int) -> None:
        self.directory = directory
        self.gpus = PlayedGpus(*(place(start, 1) for start in foreign))
        self.live: set[DeviceID] = set()
        """Uuids in allocations, which the journal has."""
        self.dies_at = self.last = ""
        self.now = 0.0
        self.gpus.before_step = self.step
        Node.playing = self
        self.start()

    def start(self, boot: str = "b1") -> None:
        self.book = InstanceLog(self.directory, boot, lambda: self.now)
        self.instances = Instances(self.book, self.gpus, lambda: None)

    def step(self, name: str) -> None:
        self.last = name
        if name == self.dies_at:
            raise Killed

    async def allocate(self, memory: int = 5 * GIB) -> None:
        """Makes, records and answers, as an Allocate does."""
        made = await self.instances.make(slot(len(self.book.instances)), A100, memory)
        self.step("granted")
        self.live.add(made.uuid)
        self.instances.release(made.uuid)

    async def end(self, uuid: DeviceID) -> None:
        """Its container ends."""
        self.live.remove(uuid)
        await self.instances.destroy_unused(lambda: self.live)

    def check(self) -> None:
        """An instance is there for each allocation, and for no other; those of others are as they were."""
        mine = {each.uuids for each in self.gpus.instances.values()} - self.gpus.foreign
        assert {frozenset({uuid}) for uuid in self.live} == mine
        assert self.gpus.foreign <= {each.uuids for each in self.gpus.instances.values()}
        assert self.live == {each.uuid for each in self.book.instances}


@pytest.fixture(autouse=True)
def _writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can end before and after each write of the book."""
    put = books.put_whole

    def put_whole(path: Path, payload: bytes) -> None:
        node = getattr(Node, "playing", None)
        if node is None or node.directory != path.parent:
            put(path, payload)
            return
        name = {"made": "noted", "destroyed": "forgotten"}.get(node.last, "intent")
        node.step(name)
        put(path, payload)
        node.step(f"after {name}")

    monkeypatch.setattr(books, "put_whole", put_whole)


@pytest.fixture
def full_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Makes blocks in which the disk takes one write of the book, and is full then."""

    @contextmanager
    def block() -> Iterator[None]:
        put, writes = books.put_whole, list[bytes]()

        def put_first(path: Path, payload: bytes) -> None:
            writes.append(payload)
            if len(writes) > 1:
                raise OSError(28, "No space left on device")
            put(path, payload)

        with monkeypatch.context() as patch:
            patch.setattr(books, "put_whole", put_first)
            yield

    return block


@pytest.mark.parametrize("step", [*STEPS, "after intent", "after noted", "after forgotten"])
async def test_who_is_killed_at_a_step_leaves_nothing_over(step: str, tmp_path: Path) -> None:
    node = Node(tmp_path, 0, 6)
    await node.allocate()
    (first,) = node.live
    node.dies_at = step
    with suppress(Killed):
        await node.allocate()
    with suppress(Killed):
        await node.end(first)
    node.dies_at = ""

    node.start()
    await node.instances.destroy_unused(lambda: node.live)

    node.check()
    await node.allocate()
    node.check()


class StoredGpus(PlayedGpus):
    """GPUs that outlive a process that the kernel kills: a file has their instances."""

    def __init__(self, path: Path) -> None:
        super().__init__(place(0, 1), place(6, 1))
        self.path = path
        self.dies_at = ""
        if path.exists():
            self.instances, self.made = pickle.loads(path.read_bytes())  # written by this test
        self.before_step = self.stored

    def stored(self, step: str) -> None:
        self.path.write_bytes(pickle.dumps((self.instances, self.made)))
        if step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_gets_sigkill_at_a_step_leaves_nothing_over(tmp_path: Path) -> None:
    """Each process makes an instance, records and answers, and destroys it; the next one finds what is left."""

    async def live(directory: Path, dies_at: str) -> int:
        gpus = StoredGpus(directory / "gpus")
        gpus.dies_at = dies_at
        instances = Instances(InstanceLog(directory, "b", lambda: 0.0), gpus, lambda: None)
        await instances.destroy_unused(tuple)
        there = len(gpus.instances)
        made = await instances.make(slot(0), A100, 5 * GIB)
        instances.release(made.uuid)
        await instances.destroy_unused(tuple)
        gpus.stored("end")
        return there

    steps = [step for step in STEPS if step not in ("intent", "noted", "granted", "forgotten")]
    killed = []
    for step in [*steps, ""]:
        if not (child := os.fork()):
            anyio.run(live, tmp_path, step)
            os._exit(0)
        killed.append(os.WIFSIGNALED(os.waitpid(child, 0)[1]))
        gpus = StoredGpus(tmp_path / "gpus")
        assert 2 <= len(gpus.instances) <= 3

    assert [*(True for _ in steps), False] == killed
    assert 2 == anyio.run(live, tmp_path, "")
    assert () == InstanceLog(tmp_path, "b", lambda: 0.0).instances


def test_what_the_book_has_is_on_the_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content before the name: after a power cut the file is the former one or this one."""
    calls = syncs_and_renames(monkeypatch)
    books.put_whole(tmp_path / books.NAME, b"{}")

    assert [f"sync .{books.NAME}.new", f"rename to {books.NAME}", "sync directory"] == calls


async def test_an_instance_of_anothers_making_is_never_destroyed(tmp_path: Path) -> None:
    """It was made at the place and with the id of one of ours, which somebody has removed."""
    node = Node(tmp_path)
    await node.allocate()
    ((key, mine),) = node.gpus.instances.items()
    node.gpus.instances[key] = mine._replace(uuids=frozenset({DeviceID("MIG-theirs")}))
    node.live.clear()

    await node.instances.destroy_unused(lambda: node.live)

    assert [frozenset({"MIG-theirs"})] == [each.uuids for each in node.gpus.instances.values()]
    assert () == node.book.instances


async def test_what_was_there_before_an_intent_is_not_ours(tmp_path: Path) -> None:
    """An operator has made an instance at the very place, and ours failed."""
    node = Node(tmp_path, 6)
    (number,) = (number for _, number in node.gpus.instances)
    intent = OwnInstance(slot=slot(0), profile="1g.5gb", placement=place(6, 1), before=(number,))
    node.book.replace((), (intent,))
    node.start()

    await node.instances.destroy_unused(tuple)

    node.check()


@pytest.mark.parametrize("step", ["gpu instance", "compute instance", "made", "there"])
async def test_a_driver_that_fails_leaves_nothing_over(step: str, tmp_path: Path) -> None:
    """Also where it has made the instance and did not say so."""
    node = Node(tmp_path, 0)

    def fail(name: str) -> None:
        if name == step:
            raise DriverFault("the driver does not answer", "look")

    node.gpus.before_step = fail
    with pytest.raises(DriverFault):
        await node.allocate()
    node.gpus.before_step = node.step
    await node.instances.destroy_unused(lambda: node.live)

    node.check()
    await node.allocate()
    node.check()
    assert {} == node.instances.failing


async def test_a_place_that_somebody_takes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    """The driver works, and what is at the place of the intent is somebody else's."""
    node = Node(tmp_path)

    def take(step: str) -> None:
        if step == "gpu instance":
            node.gpus.before_step = node.step
            node.gpus.add(GPU, place(6, 1), DeviceID("MIG-theirs"))
            node.gpus.foreign = frozenset({frozenset({DeviceID("MIG-theirs")})})

    node.gpus.before_step = take
    await node.allocate()

    assert {} == node.instances.failing
    assert {place(6, 1), place(5, 1)} == {each.placement for each in node.gpus.instances.values()}
    node.check()


async def test_a_gpu_that_is_full_by_somebody_else_is_no_fault(tmp_path: Path) -> None:
    node = Node(tmp_path)

    def refuse(step: str) -> None:
        if step == "gpu instance":
            raise PlaceTaken(GPU, "1g.5gb", place(0, 1))

    node.gpus.before_step = refuse
    with pytest.raises(NoPlace):
        await node.allocate()

    assert {} == node.instances.failing
    node.check()


@pytest.mark.parametrize(("profile", "uuids"), [("4g.20gb", ["MIG-theirs"]), ("3g.20gb", ["MIG-8", "MIG-9"])])
async def test_an_instance_that_we_would_not_make_is_not_ours(profile: str, uuids: list[str], tmp_path: Path) -> None:
    """It is of another profile, or divided; the agent was killed before it made its own there."""
    node = Node(tmp_path)
    await node.allocate(20 * GIB)
    node.dies_at = "gpu instance"
    with pytest.raises(Killed):
        await node.allocate(20 * GIB)
    node.dies_at = ""
    node.gpus.add(GPU, place(0, 4), *map(DeviceID, uuids), profile=profile)
    node.gpus.foreign = frozenset({frozenset(map(DeviceID, uuids))})

    node.start()
    await node.instances.destroy_unused(lambda: node.live)

    node.check()


async def test_what_cannot_be_destroyed_is_tried_again_and_its_place_stays_taken(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.allocate(40 * GIB)
    (uuid,) = node.live

    def fail(name: str) -> None:
        if name.startswith("destroy"):
            raise DriverFault("in use", "look")

    node.gpus.before_step = fail
    await node.end(uuid)
    assert "in use" == node.instances.failing[GPU]
    with pytest.raises(NoPlace):
        await node.allocate()

    node.gpus.before_step = node.step
    await node.instances.destroy_unused(lambda: node.live)
    node.check()
    await node.allocate()
    node.check()


async def test_a_gpu_with_an_instance_in_use_gives_others(tmp_path: Path) -> None:
    """A monitor has it open, as they do: the driver works."""
    node = Node(tmp_path)
    await node.allocate()
    (uuid,) = node.live

    def fail(name: str) -> None:
        if name.startswith("destroy"):
            raise InstanceInUse("processes use it", "look")

    node.gpus.before_step = fail
    await node.end(uuid)
    assert {} == node.instances.failing
    await node.allocate()
    assert 2 == len(node.gpus.instances)

    node.gpus.before_step = node.step
    await node.instances.destroy_unused(lambda: node.live)
    node.check()


async def test_what_is_recorded_while_another_is_destroyed_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.allocate()
    made = await node.instances.make(slot(1), A100, 5 * GIB)
    first, *_ = node.live
    node.live.clear()

    def record(step: str) -> None:
        if step == "destroyed":
            node.live.add(made.uuid)
            node.instances.release(made.uuid)

    node.gpus.before_step = record
    await node.instances.destroy_unused(lambda: frozenset(node.live))

    assert first != made.uuid
    node.check()


async def test_what_is_not_recorded_yet_stays_until_its_allocate_is_over(tmp_path: Path) -> None:
    node = Node(tmp_path)
    made = await node.instances.make(slot(0), A100, 5 * GIB)

    await node.instances.destroy_unused(tuple)
    kept = [each.uuids for each in node.gpus.instances.values()]
    node.instances.release(made.uuid)
    await node.instances.destroy_unused(tuple)

    assert [frozenset({made.uuid})] == kept
    node.check()


async def test_a_spared_place_is_taken_only_if_there_is_no_other(tmp_path: Path) -> None:
    """3g is reserved at slice 4, where 1g would go."""
    node = Node(tmp_path)

    beside = await node.instances.make(slot(0), A100, 5 * GIB, {place(4, 4)})
    within = await node.instances.make(slot(1), A100, 5 * GIB, {place(0, 8)})

    assert (place(3, 1), place(6, 1)) == (beside.placement, within.placement)


async def test_a_full_disk_refuses_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)

    def full(path: Path, payload: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(books, "put_whole", full)
        with pytest.raises(StateFault, match="No space left"):
            await node.allocate()
    node.check()


async def test_a_disk_that_is_full_after_the_driver_is_asked_undoes_that(
    tmp_path: Path, full_later: Callable[[], AbstractContextManager[None]]
) -> None:
    node = Node(tmp_path)
    with full_later(), pytest.raises(StateFault):
        await node.allocate()
    assert {} == node.gpus.instances
    node.start()
    await node.instances.destroy_unused(lambda: node.live)
    node.check()


async def test_what_is_made_by_hand_after_an_undone_intent_is_not_ours(
    tmp_path: Path, full_later: Callable[[], AbstractContextManager[None]]
) -> None:
    """The driver failed, and the disk, so that the intent is still in the book."""
    node = Node(tmp_path)

    def fail(step: str) -> None:
        if step == "gpu instance":
            raise DriverFault("no", "look")

    node.gpus.before_step = fail
    with full_later():
        with pytest.raises(DriverFault):
            await node.allocate()
        node.gpus.add(GPU, place(6, 1), DeviceID("MIG-theirs"))
        await node.instances.destroy_unused(tuple)
    await node.instances.destroy_unused(tuple)

    assert [frozenset({"MIG-theirs"})] == [each.uuids for each in node.gpus.instances.values()]
    assert () == node.book.instances


@pytest.mark.parametrize(("away", "left"), [(books.AWAY_SECONDS, 0), (books.AWAY_SECONDS + 1, 1), (-1.0, 1)])
async def test_an_old_intent_does_not_make_an_instance_ours(away: float, left: int, tmp_path: Path) -> None:
    """The agent was killed before it made the instance, and somebody makes one before it starts again."""
    node = Node(tmp_path)
    node.dies_at = "gpu instance"
    with pytest.raises(Killed):
        await node.allocate()
    node.gpus.add(GPU, place(6, 1), DeviceID("MIG-theirs"))
    node.now += away

    node.start()
    await node.instances.destroy_unused(tuple)

    assert left == len(node.gpus.instances)
    assert () == node.book.instances


async def test_a_book_that_is_looked_after_does_not_grow_old(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.allocate()
    node.now += books.AWAY_SECONDS
    node.instances.stamp()
    node.now += books.AWAY_SECONDS
    node.live.clear()

    node.start()
    await node.instances.destroy_unused(tuple)

    node.check()


async def test_a_reboot_has_ended_all_instances(tmp_path: Path) -> None:
    """The ids may be others' now."""
    node = Node(tmp_path)
    await node.allocate()
    (uuids,) = (each.uuids for each in node.gpus.instances.values())

    node.start("b2")
    await node.instances.destroy_unused(tuple)

    assert [uuids] == [each.uuids for each in node.gpus.instances.values()]
    assert () == node.book.instances


async def test_an_instance_of_a_slot_that_is_held_stays_without_a_record_of_it(tmp_path: Path) -> None:
    """The journal was lost, and the kubelet's checkpoint has the slot."""
    node = Node(tmp_path)
    await node.allocate()
    await node.allocate()
    first, second = (each.uuid for each in node.book.instances)
    node.start()

    await node.instances.destroy_unused(tuple, lambda: {slot(0)})

    assert [first] == [each.uuid for each in node.book.instances]
    assert second != first and 1 == len(node.gpus.instances)


@pytest.mark.parametrize("damage", [b"", b"00000000 {}\n", b"\x00" * 100])
async def test_a_book_that_cannot_be_read_makes_nothing_ours(damage: bytes, tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.allocate()
    (tmp_path / books.NAME).write_bytes(damage)

    node.start()
    await node.instances.destroy_unused(tuple)

    assert node.book.incomplete is not None
    assert 1 == len(node.gpus.instances)
    assert (tmp_path / f"{books.NAME}.corrupt").exists()


@settings(max_examples=40)
@given(deeds=st.lists(st.tuples(st.sampled_from([1, 5, 10, 20, 40]), st.sampled_from(["", *STEPS])), max_size=8))
def test_whatever_is_made_and_killed_no_place_is_taken_twice(
    deeds: list[tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Allocates and ends in turn, each of which may be killed at any step."""

    async def play() -> None:
        node = Node(tmp_path_factory.mktemp("node"), 3)
        for number, (gib, step) in enumerate(deeds):
            node.dies_at = step
            with suppress(Killed, NoPlace):
                if number % 3 == 2 and node.live:
                    await node.end(min(node.live))
                else:
                    await node.allocate(gib * GIB)
            node.dies_at = ""
            node.start()
            await node.instances.destroy_unused(lambda: node.live)
            node.check()
            places = [each.placement for each in node.gpus.instances.values()]
            assert not any(a.overlaps(b) for at, a in enumerate(places) for b in places[:at])

    anyio.run(play)
