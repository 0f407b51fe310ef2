"""
Keeps the record of a node's allocations on disk.

The state directory contains `lock`, held by the one process that may write; `journal` (`journal_format`); `published`,
the position of the newest fact that the bus has; and damaged journals. A damaged journal does not stop the node: it is
renamed to `journal.corrupt-N`, and a new journal starts with its valid part. If allocations may be missing, the header
of the new journal contains the reason, and the record is unconfirmed until the kubelet or an operator confirms it.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from topoalign.allocator.ledger import journal_format
from topoalign.allocator.ledger.journal_format import VERSION, JournalHeader, encode_line
from topoalign.allocator.ledger.state_dir import (
    check_file,
    faults,
    locked,
    no_link,
    usable,
    write_synced,
    write_whole,
)
from topoalign.core.model.errors import StateFault
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import JournalEntry
from topoalign.runtime.whole_files import sync_directory

KEPT = 5
"""Maximum number of damaged journals that are kept."""

MARK = 40
"""Length of the line in the file `published`: two 64-bit numbers."""

log = structlog.get_logger("topoalign.allocator.ledger.journal")


class FileJournal:
    """A node's journal as a file (`core.ports.Journal`); `open_journal` opens it and holds the directory's lock."""

    def __init__(self, directory: Path, node: NodeName) -> None:
        self.directory = directory
        self.path = directory / "journal"
        self.node = node
        self.dropped = 0  # bytes of an unfinished last line that `load` removed
        self.syncs = 0  # number of syncs of the journal to disk
        self.unconfirmed: str | None = None  # why the record is not confirmed
        self._lines: list[bytes] = []
        self._file: int | None = None
        self._size = 0
        self._suspect = False

    @property
    def set_aside(self) -> list[Path]:
        """Damaged journals, the oldest first."""
        numbered = [(path.name.rpartition("-")[2], path) for path in self.directory.glob("journal.corrupt-*")]
        return [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdecimal())]

    def load(self) -> list[JournalEntry]:
        """Reads the valid entries. Creates a missing journal and recovers a damaged one. Raises StateFault."""
        content, found = self.read()
        if content is None and found.damage is None:
            self.rewrite([])
            self.mark_published(0, 0)
            return []
        self._lines = [line.encoded for line in found.lines]
        self.unconfirmed = found.unconfirmed
        if found.damage is not None:
            self.recover(found, content is not None)
            return [line.entry for line in found.lines]
        if found.unconfirmed is not None:
            log.error("the record is still unconfirmed", since=found.unconfirmed)
        self.dropped = found.unfinished
        with faults(self.path, "open the journal"):
            self.open()
            if self.dropped:
                self.cut(self._size - self.dropped)
        return [line.entry for line in found.lines]

    def read(self) -> tuple[bytes | None, journal_format.JournalContent]:
        """Returns the bytes of the file (None if it does not exist) and their decoded content. Raises StateFault."""
        published = self.published()
        try:
            with open(self.path, "rb", opener=no_link) as file:
                content = file.read()
        except FileNotFoundError:
            used = os.path.lexists(self.directory / "published")  # this file is created after the journal
            return None, journal_format.lost_journal(
                "it is missing from a directory that was used"
            ) if used else journal_format.JournalContent()
        except OSError as error:
            if error.errno == errno.EIO:
                return b"", journal_format.lost_journal("the disk cannot read it")
            with faults(self.path, "read the journal"):
                raise
        return content, journal_format.read_journal(content, self.node, published)

    def recover(self, found: journal_format.JournalContent, there: bool) -> None:
        """Starts a new journal with the valid entries, and keeps the damaged one. `there`: whether the file exists."""
        with faults(self.path, "set the damaged journal aside"):
            kept = self.put_aside() if there else None
            self.replace(self._lines)
        log.error(
            "the journal is damaged" if there else "the journal is missing",
            finding=found.damage,
            set_aside=None if kept is None else str(kept),
            entries_kept=len(found.lines),
            state="unconfirmed" if found.unconfirmed else "whole: what is damaged is older than a snapshot",
        )

    def put_aside(self) -> Path:
        """Gives the file a second name, and syncs the directory before the first name is reused. Raises OSError."""
        before = self.set_aside
        if before and before[-1].samefile(self.path):
            return before[-1]  # an earlier start was interrupted after this step
        number = int(before[-1].name.rpartition("-")[2]) + 1 if before else 1
        name = self.directory / f"journal.corrupt-{number}"
        os.link(self.path, name, follow_symlinks=False)
        sync_directory(self.directory)
        for old in before[: max(0, len(before) + 1 - KEPT)]:
            old.unlink(missing_ok=True)
        return name

    def trust(self) -> None:
        """Confirms the record, and removes the reason from the header. After a StateFault, it stays unconfirmed."""
        unconfirmed = self.unconfirmed
        self.unconfirmed = None
        try:
            with faults(self.path, "rewrite the journal"):
                self.replace(self._lines)
        except StateFault:
            self.unconfirmed = unconfirmed
            raise

    def append(self, entry: JournalEntry) -> None:
        """Writes and syncs one entry. If this raises StateFault, the entry is not in the journal."""
        line = encode_line(entry)
        with faults(self.path, "write the journal"):
            if self._suspect or not self.in_place:
                self.replace(self._lines)
            try:
                write_whole(self.file, line)
                os.fsync(self.file)
                self.syncs += 1
            except OSError:
                self._suspect = True  # the truncation may be lost, so the next append rewrites the file
                with suppress(OSError):
                    self.cut(self._size)
                raise
        self._lines.append(line)
        self._size += len(line)

    def rewrite(self, entries: Sequence[JournalEntry]) -> None:
        """Replaces all entries with these, atomically. Raises StateFault."""
        lines = [encode_line(entry) for entry in entries]
        with faults(self.path, "rewrite the journal"):
            self.replace(lines)
        self._lines = lines

    def published(self) -> tuple[int, int] | None:
        """(epoch, seq) of the newest fact that is marked as published; None: there is no readable mark."""
        try:
            epoch, seq = (self.directory / "published").read_text().split()
            return int(epoch), int(seq)
        except (OSError, ValueError):
            return None

    def mark_published(self, epoch: int, seq: int) -> None:
        """Marks this fact as published. Never raises. The mark fits in a disk sector, so the write is atomic."""
        with suppress(OSError):
            mark = os.open(self.directory / "published", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(mark, f"{epoch} {seq}".ljust(MARK).encode() + b"\n", 0)
            finally:
                os.close(mark)

    def close(self) -> None:
        """Closes the file; the next append opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def file(self) -> int:
        """The file descriptor of the journal. Opens it if necessary. Raises OSError."""
        return self._file if self._file is not None else self.open()

    @property
    def in_place(self) -> bool:
        """Whether the open file is still the journal, not deleted or replaced by another process. Raises OSError."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.file), os.lstat(self.path))
        return False

    def open(self) -> int:
        """Opens the journal for appending. Raises OSError, including for a symbolic link."""
        self.close()
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._size = os.fstat(self._file).st_size
        return self._file

    def replace(self, lines: Sequence[bytes]) -> None:
        """Writes a new file and renames it over the old one. If this raises OSError, the next append repeats it."""
        header = encode_line(JournalHeader(version=VERSION, node=self.node, unconfirmed=self.unconfirmed or ""))
        new_file = self.directory / "journal.new"
        try:
            write_synced(new_file, b"".join([header, *lines]))
            self.syncs += 1
        except OSError:
            with suppress(OSError):
                new_file.unlink(missing_ok=True)  # it takes space that the next line may need
            raise
        self._suspect = True
        os.replace(new_file, self.path)
        self.close()
        sync_directory(self.directory)
        self.open()
        self._suspect = False

    def cut(self, size: int) -> None:
        """Truncates the journal to `size` bytes, and syncs it. Raises OSError."""
        os.ftruncate(self.file, size)
        os.fsync(self.file)
        self.syncs += 1
        self._size = size


@contextmanager
def open_journal(directory: Path, node: NodeName) -> Iterator[FileJournal]:
    """Opens and locks the journal of a state directory. Raises StateInUse, StateFault and InvalidField."""
    with locked(directory):
        journal = FileJournal(directory, node)
        with usable():
            check_file(journal.path)
        try:
            yield journal
        finally:
            journal.close()
