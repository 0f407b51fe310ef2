"""
The file in which an agent notes which MIG instances are its own: a real one, on a disk that may refuse to be written, or
whose next write is the last thing that the agent does.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import mkdtemp

from simulation.limiters import MEMORY_DISK
from simulation.loop import Process

from topoalign.allocator.mig.instance_log import InstanceLog, OwnInstance
from topoalign.core.model.errors import StateFault


class BookDisk:
    """Outlives all agents."""

    def __init__(self) -> None:
        self.full = self.kills = False
        """Whether writes are refused; whether the agent is killed at the next one, before or after it has happened."""
        self.directory = Path()
        self.noted: tuple[OwnInstance, ...] = ()
        """What the newest file has."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The directory is there."""
        self.directory = Path(mkdtemp(prefix="book-", dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None))
        try:
            yield
        finally:
            shutil.rmtree(self.directory)

    def reboot(self) -> None:
        """What is noted counts no more."""
        self.noted = ()

    def put_right(self) -> None:
        self.full = self.kills = False


class FaultyBook(InstanceLog):
    """As one agent writes it."""

    def __init__(
        self,
        disk: BookDisk,
        boot: str,
        now: Callable[[], float],
        chance: Random,
        process: Process,
        kill: Callable[[Process], None],
    ) -> None:
        super().__init__(disk.directory, boot, now)
        self._disk, self._chance, self._process, self._kill = disk, chance, process, kill

    def replace(self, gone: Sequence[OwnInstance], new: Sequence[OwnInstance] = ()) -> None:
        disk = self._disk
        if self._process.dead:
            raise asyncio.CancelledError
        if disk.full:
            raise StateFault("cannot note MIG instances: No space left on device", "make room")
        if not disk.kills or self._chance.random() < 0.5:
            super().replace(gone, new)
            disk.noted = self.instances
        if disk.kills:
            disk.kills = False
            self._kill(self._process)
            raise asyncio.CancelledError
