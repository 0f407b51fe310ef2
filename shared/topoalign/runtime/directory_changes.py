"""
Wakes those who wait for a change in a directory, as the kernel tells it (inotify(7)).

Told are entries that are made, removed, renamed, written or given other attributes, not what is below them, and the end of
the directory itself. Who waits looks by itself at what has changed, and looks every now and then in any case: some file
systems tell nothing, and a mount that hides a directory is no change of it.

The rule of a look: take `next_change`, `watch` the directories, look, and then wait. So no change between the look and the
wait is missed. Where a directory cannot be watched `watch` says so, and the caller looks as often as it would without.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import anyio

from topoalign.core.ports import Clock

ATTRIB, MODIFY, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF = (
    *(0x4, 0x2, 0x40, 0x80),
    *(0x100, 0x200, 0x400, 0x800),
)
ONLYDIR = 0x01000000
MASK = ATTRIB | MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | ONLYDIR
"""Source: `linux/inotify.h`."""
READ_SIZE = 65536


class DirectoryChanges:
    """The directories that a part of a process watches. Nothing is watched unless `run` runs."""

    def __init__(self) -> None:
        self.next_change = anyio.Event()
        """Set at the next change; there is a new event for the one after by then."""
        self._is_listening = False
        self._library: Any = None
        """The C library, once something is watched: what it takes to call it is not imported before."""
        self._descriptor = -1

    async def run(self) -> None:
        """Hears the kernel until cancelled."""
        self._is_listening = True
        try:
            await anyio.sleep_forever()
        finally:
            self._is_listening = False
            if self._descriptor >= 0:
                asyncio.get_running_loop().remove_reader(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1

    def tell(self) -> None:
        """Wakes all who wait, as a change does."""
        self.next_change.set()
        self.next_change = anyio.Event()

    def watch(self, *directories: Path) -> bool:
        """
        Watches these directories from now on, as they are now. Returns whether each of them will tell of its changes; one
        that is not there does if its parent is among those before it, which tells of its creation.
        """
        if not self._is_listening or (self._descriptor < 0 and not self._open()):
            return False
        watched = {each for each in directories if self._watch(each)}
        return all(each in watched or (each.parent in watched and not each.exists()) for each in directories)

    async def wait(self, change: anyio.Event, clock: Clock, seconds: float) -> None:
        """Returns once `change`, which was `next_change`, is set, and after so many seconds at most."""
        async with anyio.create_task_group() as tasks:

            async def until_late() -> None:
                await clock.sleep(seconds)
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_late)
            await change.wait()
            tasks.cancel_scope.cancel()

    def _open(self) -> bool:
        """False where the kernel has no inotify, or too many others use it."""
        import ctypes

        try:
            self._library = ctypes.CDLL(None)
            self._descriptor = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, AttributeError):
            return False
        if self._descriptor < 0:
            return False
        asyncio.get_running_loop().add_reader(self._descriptor, self._take_changes)
        return True

    def _watch(self, directory: Path) -> bool:
        """Has no effect on one that is watched already."""
        return bool(self._library.inotify_add_watch(self._descriptor, os.fsencode(directory), MASK) >= 0)

    def _take_changes(self) -> None:
        os.read(self._descriptor, READ_SIZE)
        self.tell()
