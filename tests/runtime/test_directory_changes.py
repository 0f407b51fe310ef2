"""What the kernel tells of a directory wakes who waits for it. Nothing here waits longer than the kernel takes."""

import ctypes
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest

from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def listening() -> AsyncIterator[DirectoryChanges]:
    changes = DirectoryChanges()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(changes.run)
        await all_tasks_blocked()
        yield changes
        tasks.cancel_scope.cancel()


def bound(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(os.fspath(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "made": lambda directory: bound(directory / "new.sock"),
    "removed": lambda directory: (directory / "old").unlink(),
    "renamed": lambda directory: (directory / "old").rename(directory / "new"),
    "moved here": lambda directory: (directory.parent / "beside").rename(directory / "new"),
    "written": lambda directory: (directory / "old").write_text("other"),
    "touched": lambda directory: os.utime(directory / "old", (1, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_change_wakes_who_waits(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "old").write_text("one")
    (tmp_path / "beside").write_text("two")
    async with listening() as changes:
        change = changes.next_change
        is_told = changes.watch(directory)
        KINDS[kind](directory)
        await change.wait()

        assert is_told
        assert changes.next_change is not change


async def test_a_directory_that_is_missing_is_told_by_its_parent(tmp_path: Path) -> None:
    missing = tmp_path / "pods"
    async with listening() as changes:
        alone, change, beside = changes.watch(missing), changes.next_change, changes.watch(tmp_path, missing)
        missing.mkdir()
        await change.wait()

        assert (False, True) == (alone, beside)


async def test_a_directory_that_was_replaced_is_watched_anew(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    async with listening() as changes:
        changes.watch(directory)
        gone = changes.next_change
        directory.rmdir()
        await gone.wait()
        without = changes.watch(directory)
        directory.mkdir()
        change, again = changes.next_change, changes.watch(directory)
        (directory / "new").touch()
        await change.wait()

        assert (False, True) == (without, again)


async def test_a_file_in_the_place_of_a_directory_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "d").touch()
    async with listening() as changes:
        assert not changes.watch(tmp_path, tmp_path / "d")


async def test_nothing_is_watched_unless_it_runs(tmp_path: Path) -> None:
    async with listening() as changes:
        during = changes.watch(tmp_path)

    assert (False, True, False) == (DirectoryChanges().watch(tmp_path), during, changes.watch(tmp_path))


class Refusing:
    """A C library of a process that may have no further inotify instance."""

    def inotify_init1(self, flags: int) -> int:
        return -1


class Lacking:
    """A C library without inotify."""


@pytest.mark.parametrize("library", [Refusing, Lacking])
async def test_where_the_kernel_tells_nothing_that_is_said(
    tmp_path: Path, library: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library())
    async with listening() as changes:
        assert not changes.watch(tmp_path)


async def test_who_waits_does_not_wait_longer_than_it_said() -> None:
    clock, changes = ManualClock(), DirectoryChanges()
    waited = anyio.Event()

    async def wait() -> None:
        await changes.wait(changes.next_change, clock, 5.0)
        waited.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await clock.advance(4.9)
        early = waited.is_set()
        await clock.advance(0.1)
        await waited.wait()

        assert not early
