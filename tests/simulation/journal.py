"""
A disk that outlives the processes that write to it, and now and then fails them.

Around the product's own `MemoryJournal`: an append or a rewrite may be refused, and then has not happened; and the process
may be killed in it, just before it has happened or just after. A process that is dead writes nothing more.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from topoalign.core.model.errors import StateFault
from topoalign.core.model.events import AllocationsSnapshot, LedgerEvent
from topoalign.core.ports import JournalEntry
from topoalign.testing.memory_journal import MemoryJournal


class Disk:
    """What is on it: the same before and after any crash."""

    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.history: list[LedgerEvent] = []
        """All facts that ever counted, those that compaction has removed among them."""
        self.failures = 0
        """Writes that came to nothing since the journal was last written anew: one of them may have been to shorten it."""

    def damage(self, kept: int) -> list[JournalEntry]:
        """
        Only so many entries can still be read; the rest is set aside. Returns what is left: with a snapshot, or nothing.
        """
        entries = self.journal.load()[:kept]
        if not any(isinstance(event, AllocationsSnapshot) for entry in entries for event in entry.events):
            entries = []
        self.journal.rewrite(entries)
        self.journal.unconfirmed = f"line {kept + 2} does not match its checksum"
        return entries


class FaultyJournal:
    """The journal as one process sees it: `topoalign.core.ports.Journal`."""

    def __init__(
        self,
        disk: Disk,
        chance: Random,
        *,
        kill: Callable[[], None] = lambda: None,
        is_dead: Callable[[], bool] = lambda: False,
        delivery: Callable[[LedgerEvent], None] = lambda event: None,
        marked: Callable[[int, int], None] = lambda epoch, seq: None,
    ) -> None:
        """
        `kill` ends the process that writes; `delivery` is told every fact as it becomes true, and `marked` what counts as
        published.
        """
        self.refusals = self.kills = 0.0
        """How likely a write is refused, and how likely it is the last thing that the process does."""
        self._disk, self._chance, self._kill, self._is_dead = disk, chance, kill, is_dead
        self._heard, self._marked = delivery, marked

    @property
    def unconfirmed(self) -> str | None:
        return self._disk.journal.unconfirmed

    def load(self) -> list[JournalEntry]:
        return self._disk.journal.load()

    def trust(self) -> None:
        self._write(self._disk.journal.trust)

    def append(self, entry: JournalEntry) -> None:
        def write() -> None:
            self._disk.journal.append(entry)
            for event in entry.events:
                self._disk.history.append(event)
                self._heard(event)

        self._write(write)

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        def write() -> None:
            self._disk.journal.rewrite(entries)
            self._disk.failures = 0

        self._write(write)

    def published(self) -> tuple[int, int] | None:
        return self._disk.journal.published()

    def mark_published(self, epoch: int, seq: int) -> None:
        """A mark may be lost; it is never wrong otherwise."""
        self._marked(epoch, seq)
        if not self._is_dead() and self._chance.random() >= self.refusals:
            self._disk.journal.mark_published(epoch, seq)

    def _write(self, write: Callable[[], None]) -> None:
        if self._is_dead():
            raise asyncio.CancelledError
        if self._chance.random() < self.refusals:
            self._disk.failures += 1
            raise StateFault("cannot write the journal: No space left on device", "make room")
        if self._chance.random() < self.kills:
            self._disk.failures += 1
            if self._chance.random() < 0.5:
                write()
            self._kill()
            raise asyncio.CancelledError
        write()
