"""A journal in memory, for tests and simulations."""

from collections.abc import Sequence

from topoalign.core.ports import JournalEntry


class MemoryJournal:
    """A journal for tests and simulations: it outlives the ledger that writes it, but not the process."""

    def __init__(self) -> None:
        self.unconfirmed: str | None = None
        self._entries: list[JournalEntry] = []
        self._published: tuple[int, int] | None = (0, 0)

    def load(self) -> list[JournalEntry]:
        """All entries, oldest first."""
        return list(self._entries)

    def trust(self) -> None:
        """Confirms the record."""
        self.unconfirmed = None

    def append(self, entry: JournalEntry) -> None:
        """Adds an entry."""
        self._entries.append(entry)

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        """Replaces all entries by these."""
        self._entries = list(entries)

    def published(self) -> tuple[int, int] | None:
        """(epoch, seq) of the newest fact that the bus has; (0, 0) at first."""
        return self._published

    def mark_published(self, epoch: int, seq: int) -> None:
        """Marks this fact as published."""
        self._published = (epoch, seq)
