"""
Wakes tasks that wait for a change in a directory, as reported by the kernel (inotify(7)).

The kernel reports entries that are created, removed, renamed, written or given other attributes, and the removal of the
directory. It does not report changes in subdirectories. A waiting task reads the directory to find the change. It also
reads it periodically, because some file systems report nothing, and a mount over a directory is not reported.

A task gets `next_change`, calls `watch`, reads the directories, and then waits. So it does not miss a change between
reading and waiting. If a directory cannot be watched, `watch` returns False, and the caller polls.
"""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from topoalign.core.ports import Clock
from topoalign.runtime.tasks import wait_for_first

ATTRIB, MODIFY, MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF = (
    *(0x4, 0x2, 0x40, 0x80),
    *(0x100, 0x200, 0x400, 0x800),
)
ONLYDIR = 0x01000000
MASK = ATTRIB | MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | ONLYDIR
"""Source: `linux/inotify.h`."""
READ_SIZE = 65536


class DirectoryChanges:
    """Watches directories for one part of a process. Nothing is watched unless `run` runs."""

    def __init__(self) -> None:
        self.next_change = anyio.Event()
        """Set at the next change; a new event then replaces it."""
        self._is_listening = False
        self._library: Any = None
        """The C library; None until a directory is watched, because ctypes is imported only then."""
        self._descriptor = -1

    async def run(self) -> None:
        """Receives events of the kernel until cancelled."""
        self._is_listening = True
        try:
            await anyio.sleep_forever()
        finally:
            self._is_listening = False
            if self._descriptor >= 0:
                asyncio.get_running_loop().remove_reader(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1

    def wake(self) -> None:
        """Wakes all tasks that wait, as a change does."""
        self.next_change.set()
        self.next_change = anyio.Event()

    def watch(self, *directories: Path) -> bool:
        """
        Watches these directories from now on. Returns whether changes of all of them will be reported. A directory that does
        not exist counts as watched if its parent is watched, because its creation is then reported.
        """
        if not self._is_listening or (self._descriptor < 0 and not self._open()):
            return False
        watched = {each for each in directories if self._watch(each)}
        return all(each in watched or (each.parent in watched and not each.exists()) for each in directories)

    async def wait(self, change: anyio.Event, clock: Clock, seconds: float) -> None:
        """Waits until `change` (a former `next_change`) is set, but at most this many seconds."""
        await wait_for_first(change.wait, partial(clock.sleep, seconds))

    def _open(self) -> bool:
        """Starts inotify. Returns False if the kernel has no inotify or no free instance."""
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
        """Watches a directory; no effect if it is watched already."""
        return bool(self._library.inotify_add_watch(self._descriptor, os.fsencode(directory), MASK) >= 0)

    def _take_changes(self) -> None:
        os.read(self._descriptor, READ_SIZE)
        self.wake()
