"""What a container may do to the directories that it writes to: it costs its own, and nobody else's."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from disk_support import without_capabilities

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.hami_core import slot_directories
from topoalign.allocator.containers.hami_core.slot_directories import DirectoryOwner, prepare_slots_directory
from topoalign.core.model.ids import AllocationID

NAME = f"slots-{'a' * 32}"
FIRST = DirectoryOwner(AllocationID("first"))


def test_many_directories_that_go_take_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers leave as much as they like, in as many directories as there were: the agent serves Allocate meanwhile."""
    for number in range(40):
        prepare_slots_directory(tmp_path, name := f"slots-{number:032}", FIRST)
        for file in range(30):
            (tmp_path / name / "cache" / f"{file}").touch()
        limiter_files.remove_own_directory(tmp_path, name)
    calls, unlink = [0], os.unlink

    def counted(name: str, **kwargs: int) -> None:
        calls[0] += 1
        unlink(name, **kwargs)

    monkeypatch.setattr(os, "unlink", counted)
    rounds = []
    while os.listdir(tmp_path):
        before = calls[0]
        with suppress(OSError):
            limiter_files.remove_leftovers(tmp_path)
        rounds.append(calls[0] - before)

    assert 40 * 31 == sum(rounds)
    assert max(rounds) <= limiter_files.MOST_REMOVED
    assert len(rounds) < 10


def test_what_root_has_closed_is_removed_without_capabilities(tmp_path: Path) -> None:
    """It has the number of the agent's user; without a right to write, a directory cannot even be moved."""
    with without_capabilities():
        prepare_slots_directory(tmp_path, NAME, FIRST)
        cache = tmp_path / NAME / "cache"
        (cache / "a" / "b" / "c").mkdir(parents=True)
        for each in (cache / "a" / "b" / "c", cache / "a" / "b", cache / "a", cache):
            each.chmod(0)
        limiter_files.remove_own_directory(tmp_path, NAME)
        limiter_files.remove_leftovers(tmp_path)

    assert [] == os.listdir(tmp_path)


def test_a_directory_of_locks_that_a_container_has_closed_is_opened_again(tmp_path: Path) -> None:
    """Else nothing would be given out any more on this node."""
    with without_capabilities():
        slot_directories.make_locks(tmp_path)
        (tmp_path / "vgpulock").chmod(0)
        slot_directories.make_locks(tmp_path)

    assert 0o777 == (tmp_path / "vgpulock").stat().st_mode & 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another user")
def test_a_directory_of_locks_that_a_container_has_taken_is_made_anew(tmp_path: Path) -> None:
    slot_directories.make_locks(tmp_path)
    os.chown(tmp_path / "vgpulock", 4711, 4711)
    (tmp_path / "vgpulock").chmod(0o700)
    with without_capabilities():
        slot_directories.make_locks(tmp_path)

    found = (tmp_path / "vgpulock").stat()
    assert (0o777, os.geteuid()) == (found.st_mode & 0o777, found.st_uid)


def test_other_users_of_the_host_reach_nothing_that_containers_write(tmp_path: Path) -> None:
    """A container's root may leave a program that runs as root, or a device node."""
    (tmp_path / "hami").mkdir(mode=0o755)
    slot_directories.make_locks(tmp_path / "hami")

    assert 0o700 == (tmp_path / "hami").stat().st_mode & 0o777
