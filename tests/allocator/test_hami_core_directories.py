"""Directories of containers that are limited by HAMi-core: there with the allocation, gone with it, and nobody else's."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from slot_node_support import Ask, HamiCoreNode

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.hami_core import slot_directories
from topoalign.allocator.containers.hami_core.slot_directories import (
    DirectoryCleanup,
    DirectoryOwner,
    prepare_slots_directory,
)
from topoalign.allocator.ports import ResourceEntry
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.kubelet.files.pod_directories import PodDirectories
from topoalign.plugin_config.configuration import Configuration

pytestmark = pytest.mark.anyio
NAME = f"slots-{'a' * 32}"
FIRST, SECOND = DirectoryOwner(AllocationID("first")), DirectoryOwner(AllocationID("second"))


def directories(it: HamiCoreNode) -> set[str]:
    """What is below the root beside the installed files and the locks."""
    return {each.name for each in it.root.iterdir()} - {"libvgpu.so", "ld.so.preload", "vgpulock"}


def test_what_may_not_be_removed_takes_no_others_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []

    def remove_tree(at: int, name: str, most: int) -> int:
        parts.append(most)
        if len(parts) < 3:
            raise PermissionError(1, "Operation not permitted", name)
        return 1

    monkeypatch.setattr(limiter_files, "remove_tree", remove_tree)
    for number in range(3):
        (tmp_path / f".gone-{number:016x}").mkdir()
    with pytest.raises(PermissionError):
        limiter_files.remove_leftovers(tmp_path)

    assert 3 == len(parts)
    assert limiter_files.MOST_REMOVED == parts[-1]


async def test_directories_go_with_their_allocations_and_nothing_else_does() -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        await it.run_pod("b", Ask(memory=2_000))
        (it.root / f"slots-{'0' * 32}").mkdir()
        others = {"notes", "slots-0", f"units-{'0' * 32}", f"slots-{'b' * 32}"}
        for name in others - {f"slots-{'b' * 32}"}:
            (it.root / name).mkdir()
        (it.root / f"slots-{'b' * 32}").symlink_to(it.root.parent)
        (it.cache("a") / "x.cache").write_bytes(b"used")
        kept = {it.named("a"), it.named("b")}
        it.sweep()
        assert others | kept == directories(it)

        gone = it.named("a")
        await it.remove("a")
        it.sweep()

        assert others | (kept - {gone}) == directories(it)
        assert it.root.parent.exists()


async def test_the_owner_of_a_directory_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cleanup runs in the event loop, and a node may have hundreds of directories."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        it.sweep()

        monkeypatch.setattr(slot_directories, "read_directory_owner", refuse)
        it.sweep()

        assert {it.named("a")} == directories(it)


async def test_nothing_is_removed_without_an_answer_of_the_kubelet() -> None:
    async with HamiCoreNode.running() as (it, _):
        (it.root / NAME).mkdir()

        it.sweeps.clean_up(it.ledger.state, None)
        assert {NAME} == directories(it)
        await it.allocations.reconcile()
        poll = it.allocations.polled
        assert poll is not None
        unread = poll._replace(listing=msgspec.structs.replace(poll.listing, checkpoint=None))
        it.sweeps.clean_up(it.ledger.state, unread)
        assert {NAME} == directories(it)
        it.sweep()
        assert set() == directories(it)


async def test_a_directory_stays_while_its_pod_is_there_or_the_checkpoint_has_it() -> None:
    """The record may have lost a container that runs: with the journal, or where the kubelet has lost its checkpoint."""
    slot = DeviceID("GPU-1::3")
    async with HamiCoreNode.running() as (it, _):
        await it.allocations.reconcile()
        poll = it.allocations.polled
        assert poll is not None
        prepare_slots_directory(it.root, NAME, DirectoryOwner(AllocationID("of-old"), "uid-old"))
        prepare_slots_directory(
            it.root,
            by_slot := slot_directories.slots_directory_name(GPU, [slot]),
            DirectoryOwner(AllocationID("of-new")),
        )

        def sweep(old: bool, listed: tuple[ResourceEntry, ...]) -> set[str]:
            pods = PodDirectories(torn_down={"uid-new": False, "uid-old": not old})
            listing = msgspec.structs.replace(poll.listing, directories=pods, parts=listed)
            it.sweeps.clean_up(it.ledger.state, poll._replace(listing=listing))
            it.sweeps.remove_leftovers()
            return directories(it)

        entry = ResourceEntry(GPU, frozenset([slot]), "uid-new", "c0")
        assert {NAME, by_slot} == sweep(True, (entry,))
        assert {by_slot} == sweep(False, (entry,))
        assert set() == sweep(False, (entry._replace(pod_uid="uid-gone"),))


async def test_a_directory_of_a_container_that_runs_outlives_agent_and_journal() -> None:
    async with HamiCoreNode.running() as (it, tasks):
        await it.run_pod("a", Ask(memory=1_000))
        file = it.cache("a") / "x.cache"
        file.write_bytes(b"used")
        it.sweep()

        await it.start_agent(tasks)
        it.sweep()
        await it.restart_kubelet()
        it.sweep()
        it.journal = type(it.journal)()
        await it.start_agent(tasks)
        await it.allocations.reconcile()
        it.sweep()

        assert b"used" == file.read_bytes()
        (record,) = it.records("a")
        assert DirectoryOwner(record.id, record.pod_uid) == slot_directories.read_directory_owner(
            it.root, it.named("a")
        )
        assert "uid-a" == record.pod_uid


async def test_a_directory_that_is_gone_is_made_again() -> None:
    """The kubelet gives a container that starts again the same mount."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        limiter_files.remove_own_directory(it.root, it.named("a"))
        limiter_files.remove_leftovers(it.root)
        (it.root / "vgpulock").rmdir()
        assert not it.cache("a").exists()

        it.sweep()

        assert 0o777 == it.cache("a").stat().st_mode & 0o777
        assert {it.named("a")} == directories(it)
        assert (it.root / "vgpulock").is_dir()


async def test_the_directory_of_an_init_container_is_made_again() -> None:
    """Its slot is the app container's beside another one now, and a pod whose sandbox was lost runs it once more."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(2, memory=1_000), init=(Ask(1, memory=1_000),))
        both = {it.named("a", "c0"), it.named("a", "c1")}
        for name in both:
            limiter_files.remove_own_directory(it.root, name)
        limiter_files.remove_leftovers(it.root)
        assert set() == directories(it)

        it.sweep()
        assert both == directories(it) and it.cache("a", "c0").is_dir()
        it.sweep()
        assert both == directories(it)
        await it.remove("a")
        it.sweep()
        assert set() == directories(it)


async def test_a_pod_that_takes_over_slots_finds_nothing_of_the_former() -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("old", Ask(memory=1_000))
        slots, cache = it.slots_of("old")["c0"], it.cache("old")
        (cache / "x.cache").write_bytes(b"of old")
        await it.drop("old")
        it.forced, it.reserved = {GPU: slots}, NodeReservations()

        assert isinstance(await it.admit_pod(it.asking("new", Ask(1))), Admission)

        assert cache == it.cache("new")
        assert [] == os.listdir(cache)
        await it.allocations.reconcile()
        it.sweep()
        assert {it.named("new")} == directories(it)


async def test_a_configuration_without_slots_keeps_what_containers_have() -> None:
    async with HamiCoreNode.running() as (it, tasks):
        await it.run_pod("a", Ask(memory=1_000))
        await it.start_agent(tasks, msgspec.structs.replace(it.machine, offers=()))
        it.sweep()

        assert it.cache("a").is_dir()
        it.configuration = Configuration()
        it.sweep()
        assert it.cache("a").is_dir()


async def test_sweeps_begin_when_a_root_is_configured_and_outlive_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with HamiCoreNode.running() as (it, tasks):
        await it.allocations.reconcile()
        roots = [""]
        tasks.start_soon(DirectoryCleanup(lambda: roots[0]).run, it.allocations, it.clock)
        (it.root / NAME).mkdir()
        await it.clock.advance(6)
        assert {NAME} == directories(it)

        with monkeypatch.context() as patched:
            patched.setattr(limiter_files, "remove_own_directory", refuse)
            roots[0] = str(it.root)
            await it.clock.advance(6)
            await it.clock.advance(6)
            assert {NAME} == directories(it)
        while directories(it):  # in a thread
            await it.clock.advance(6)


def refuse(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


async def test_where_no_directory_can_be_made_allocate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record without an answer is dropped as every other that the kubelet has never received of."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with HamiCoreNode.running() as (it, _):
        with monkeypatch.context() as patched:
            patched.setattr(slot_directories, "replace_file", full)
            decision = await it.admit_pod(it.asking("a", Ask(1)))
        assert isinstance(decision, Refusal)
        assert "No space left" in decision.finding
        await it.clock.advance(60)
        await it.settle()
        await it.clock.advance(60)
        await it.settle()
        it.sweep()
        assert {} == dict(it.ledger.state.allocations)
        assert set() == directories(it)


def test_a_directory_is_kept_for_its_record_and_made_anew_for_another(tmp_path: Path) -> None:
    prepare_slots_directory(tmp_path, NAME, FIRST)
    (tmp_path / NAME / "cache" / "x").touch()
    prepare_slots_directory(tmp_path, NAME, FIRST._replace(pod_uid="uid"))
    assert ["x"] == os.listdir(tmp_path / NAME / "cache")
    prepare_slots_directory(tmp_path, NAME, SECOND)

    assert [] == os.listdir(tmp_path / NAME / "cache")
    assert SECOND == slot_directories.read_directory_owner(tmp_path, NAME)
    limiter_files.remove_leftovers(tmp_path)
    assert [NAME] == os.listdir(tmp_path)


def test_what_a_container_left_is_removed_some_at_a_time_however_deep(tmp_path: Path) -> None:
    """Links are removed and not followed."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    root = tmp_path / "root"
    root.mkdir()
    prepare_slots_directory(root, NAME, FIRST)
    cache = root / NAME / "cache"
    for number in range(600):
        (cache / f"{number}").touch()
    (cache / "link").symlink_to(kept)
    closed = cache / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0)
    at = os.open(cache, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    limiter_files.remove_own_directory(root, NAME)
    calls = 0
    while os.listdir(root):
        with suppress(OSError):
            limiter_files.remove_leftovers(root)
        calls += 1

    assert 1 <= calls < 10
    assert ["file"] == os.listdir(kept)


def test_something_of_others_in_the_way_is_refused_and_left(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / NAME).symlink_to(other)

    with pytest.raises(FileExistsError):
        prepare_slots_directory(tmp_path, NAME, FIRST)
    with pytest.raises(FileExistsError):
        limiter_files.remove_own_directory(tmp_path, NAME)
    assert (tmp_path / NAME).is_symlink()
    assert [] == os.listdir(other)


def test_a_name_tells_resource_and_slots_in_any_order() -> None:
    slots = [DeviceID("GPU-0::1"), DeviceID("GPU-1::4")]

    assert slot_directories.slots_directory_name(GPU, slots) == slot_directories.slots_directory_name(GPU, slots[::-1])
    assert slot_directories.NAME.fullmatch(slot_directories.slots_directory_name(GPU, slots))
    assert slot_directories.slots_directory_name(GPU, slots) != slot_directories.slots_directory_name(GPU, slots[:1])


def test_a_root_that_is_not_there_has_nothing_to_remove(tmp_path: Path) -> None:
    assert [] == limiter_files.list_own_directories(tmp_path / "none", slot_directories.NAME)
    limiter_files.remove_own_directory(tmp_path / "none", NAME)
    limiter_files.remove_leftovers(tmp_path / "none")


async def test_the_sweep_goes_on_beside_what_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents have no right to pass over the rights of files: a container's user can leave what they cannot read."""
    async with HamiCoreNode.running() as (it, _):
        await fail_for_one(it, monkeypatch)


async def fail_for_one(it: HamiCoreNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await it.allocations.reconcile()
    for digit in "ab":
        prepare_slots_directory(it.root, f"slots-{digit * 32}", FIRST)
        (it.root / f"slots-{digit * 32}" / "cache" / digit).touch()
    unlink = os.unlink

    def refused(name: str, *args: object, **kwargs: int) -> None:
        if name == "a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        unlink(name, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refused)
        for _ in range(3):
            with pytest.raises(PermissionError):
                it.sweep()
        assert 1 == len(directories(it))
    it.sweep()
    assert set() == directories(it)
