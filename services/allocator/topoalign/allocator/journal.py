"""
The record of a node's allocations on disk, and one in memory with the same promises.

A directory of its own holds three files: `lock`, held by the one process that may write; `journal`, a header and then one
line per entry; `published`, how far the bus has heard. A line is the CRC-32 of its JSON, a blank, and the JSON. An entry
counts once its line is whole and synced: a line without an end is an append that was cut short and never answered, so it
is dropped; any other damage is a reason to stop and say so, because what a damaged record held is not to be guessed.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec

from topoalign.core.errors import InvalidField, StateFault, clean
from topoalign.core.ids import NodeName
from topoalign.core.ports import Entry

VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="topoalign.journal"):
    """The first line: whose journal this is, and how it is written."""

    version: int
    node: NodeName


class FileJournal:
    """The journal in a directory. Made by `open_journal`, which holds the directory's lock while it is in use."""

    def __init__(self, directory: Path, node: NodeName) -> None:
        self.directory = directory
        self.path = directory / "journal"
        self.node = node
        self.dropped = 0
        """Bytes of an unfinished line that `load` dropped."""
        self._lines: list[bytes] = []
        self._file: int | None = None
        self._size = 0
        self._suspect = False

    def load(self) -> list[Entry]:
        with faults(self.path, "read the journal"):
            if not self.path.exists():
                self.rewrite([])
                self.mark_published(0, 0)
                return []
            content = self.path.read_bytes()
        whole, _, rest = content.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        if not lines:
            raise self.damaged("it has no header line")
        header, *entries = (self.payload(number, line) for number, line in enumerate(lines, 1))
        self.check(header)
        decoded = [self.entry(number, payload) for number, payload in enumerate(entries, 2)]
        self._lines = [line + b"\n" for line in lines[1:]]
        self.dropped = len(rest)
        with faults(self.path, "open the journal"):
            self.open()
            if rest:
                self.cut(len(content) - len(rest))
        return decoded

    def append(self, entry: Entry) -> None:
        line = encoded(entry)
        with faults(self.path, "write the journal"):
            if self._suspect:
                self.replace(self._lines)
            try:
                write_whole(self.file, line)
                os.fsync(self.file)
            except OSError:
                self.undo()
                raise
        self._lines.append(line)
        self._size += len(line)

    def rewrite(self, entries: Sequence[Entry]) -> None:
        lines = [encoded(entry) for entry in entries]
        with faults(self.path, "rewrite the journal"):
            self.replace(lines)
        self._lines = lines

    def published(self) -> tuple[int, int] | None:
        try:
            epoch, seq = (self.directory / "published").read_text().split()
            return int(epoch), int(seq)
        except (OSError, ValueError):
            return None

    def mark_published(self, epoch: int, seq: int) -> None:
        mark = self.directory / "published.new"
        try:
            mark.write_text(f"{epoch} {seq}\n")
            mark.replace(self.directory / "published")
        except OSError:
            mark.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def file(self) -> int:
        if self._file is None:
            self.open()
        assert self._file is not None
        return self._file

    def open(self) -> None:
        self.close()
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._size = os.fstat(self._file).st_size

    def replace(self, lines: Sequence[bytes]) -> None:
        """
        Writes a new file beside the old one and puts it in its place: at any moment one of the two is whole.

        Wherever this fails, the next append begins with it anew, because the open file may be the one that was replaced.
        """
        self._suspect = True
        beside = self.directory / "journal.new"
        target = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_whole(target, b"".join([encoded(Header(version=VERSION, node=self.node)), *lines]))
            os.fsync(target)
        finally:
            os.close(target)
        os.replace(beside, self.path)
        self.close()
        sync_directory(self.directory)
        self.open()
        self._suspect = False

    def undo(self) -> None:
        """After a failed append the file is cut back; whether the disk agrees is unknown until it is written anew."""
        self._suspect = True
        try:
            self.cut(self._size)
        except OSError:
            self.close()

    def cut(self, size: int) -> None:
        os.ftruncate(self.file, size)
        os.fsync(self.file)
        self._size = size

    def payload(self, number: int, line: bytes) -> bytes:
        checksum, _, payload = line.partition(b" ")
        if checksum != b"%08x" % crc32(payload):
            raise self.damaged(f"line {number} does not match its checksum")
        return payload

    def check(self, payload: bytes) -> None:
        try:
            header = msgspec.json.decode(payload, type=Header)
        except msgspec.DecodeError as error:
            raise self.damaged(f"its header: {clean(str(error), 200)}") from error
        if header.version != VERSION:
            raise self.damaged(f"it is of version {header.version}, this program writes version {VERSION}")
        if header.node != self.node:
            raise StateFault(
                f"{self.path} is the journal of node {header.node!r}, not of {self.node!r}",
                "give each node a state directory of its own, or set TOPOALIGN_NODE to the name in the journal",
            )

    def entry(self, number: int, payload: bytes) -> Entry:
        try:
            return msgspec.json.decode(payload, type=Entry)
        except msgspec.DecodeError as error:
            raise self.damaged(f"line {number}: {clean(str(error), 200)}") from error

    def damaged(self, finding: str) -> StateFault:
        return StateFault(
            f"{self.path} is damaged: {finding}",
            "allocations cannot be trusted: drain the node, move the file away, and start again",
        )


class MemoryJournal:
    """A journal for tests and simulations: it outlives the ledger that writes it, but not the process."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._published: tuple[int, int] | None = (0, 0)

    def load(self) -> list[Entry]:
        return list(self._entries)

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)

    def rewrite(self, entries: Sequence[Entry]) -> None:
        self._entries = list(entries)

    def published(self) -> tuple[int, int] | None:
        return self._published

    def mark_published(self, epoch: int, seq: int) -> None:
        self._published = (epoch, seq)


@contextmanager
def open_journal(directory: Path, node: NodeName) -> Iterator[FileJournal]:
    """
    The journal of a state directory, which is made if it is missing and locked while the context is open.

    Raises StateFault if another process has it (naming its pid), InvalidField if the directory cannot be used.
    """
    try:
        with faults(directory, "use the state directory"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except StateFault as fault:
        raise InvalidField("TOPOALIGN_STATE_DIR", fault.finding, fault.remedy) from fault
    journal = FileJournal(directory, node)
    try:
        take_lock(lock, directory)
        yield journal
    finally:
        journal.close()
        os.close(lock)


def take_lock(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = clean(os.pread(lock, 32, 0).decode("ascii", "replace").strip(), 32) or "unknown"
        raise StateFault(
            f"{directory} is in use by another allocator, pid {holder}",
            "one allocator runs per node: stop the other one, or give this one another state directory",
        ) from error
    with faults(directory, "write the lock file"):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def encoded(record: Entry | Header) -> bytes:
    payload = msgspec.json.encode(record)
    return b"%08x %s\n" % (crc32(payload), payload)


def write_whole(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


REMEDIES = {
    errno.ENOSPC: "the disk is full: make room; nothing was lost, and it works again once there is space",
    errno.EDQUOT: "the quota is used up: make room; nothing was lost",
    errno.EACCES: "the directory must belong to the user that the allocator runs as, with mode 0700",
    errno.EROFS: "the file system is read-only: give the allocator a writable state directory",
    errno.ELOOP: "a symbolic link stands where a file of the allocator belongs: remove it",
    errno.EIO: "the disk reports errors: check it; the entry counts as not written",
}


@contextmanager
def faults(path: Path, deed: str) -> Iterator[None]:
    """Turns an OSError into a StateFault that says what could not be done, why, and what helps."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "check the directory that TOPOALIGN_STATE_DIR names")
        raise StateFault(f"cannot {deed} at {path}: {error.strerror or error}", remedy) from error
