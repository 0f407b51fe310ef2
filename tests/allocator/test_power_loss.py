"""What was answered is there after the power went at any moment: a disk keeps for certain only what was synced."""

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from topoalign.allocator.ledger.journal import open_journal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.errors import StateFault
from topoalign.core.model.events import Allocation, AllocationsSnapshot
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.ports import JournalEntry
from topoalign.testing.manual_clock import ManualClock

NODE = NodeName("node-1")
Image = frozenset[tuple[str, bytes]]
"""What a disk has: names and contents."""
Held = frozenset[str]


class Disk:
    """
    Watches what is done in a directory, and knows after each call what a disk may have of it if the power goes then: names
    as they are or as they were synced last, and contents likewise.
    """

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.names: dict[str, int] = {}
        """Synced: name -> inode."""
        self.contents: dict[int, bytes] = {}
        """Synced: inode -> content."""
        self.after_call: Callable[[], None] = lambda: None
        self.room = 1 << 30
        self.failing = False
        """Whether the next sync fails."""
        self.failing_directory = False
        """Whether the next sync of a directory fails."""
        self.keeps_size = False
        """Whether no file can be cut."""
        self.lost: set[int] = set()
        """Inodes of which a sync has failed: the kernel calls later ones a success, although the data are lost."""
        for call in ("open", "write", "pwrite", "fsync", "replace", "link", "unlink", "ftruncate"):
            patch.setattr(os, call, self._watched(getattr(os, call), call))

    def _watched(self, original: Callable[..., Any], call: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if call == "write":
                if not self.room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                args = (args[0], bytes(args[1])[: self.room])
                self.room -= len(args[1])
            if call == "ftruncate" and self.keeps_size:
                raise OSError(errno.EIO, "Input/output error")
            result = original(*args, **kwargs)
            if call == "open" and args[1] & os.O_TRUNC:
                self._forget(os.fstat(result).st_ino)
            if call == "fsync" and self.failing:
                self.failing = False
                self.lost.add(os.fstat(args[0]).st_ino)
                raise OSError(errno.EIO, "Input/output error")
            if call == "fsync" and self.failing_directory and stat.S_ISDIR(os.fstat(args[0]).st_mode):
                self.failing_directory = False
                raise OSError(errno.EIO, "Input/output error")
            if call == "fsync":
                self._sync(args[0])
            if call != "open":
                self.after_call()
            return result

        return watched

    def _forget(self, inode: int) -> None:
        """A new file may have the number of one that has gone."""
        self.lost.discard(inode)
        self.contents.pop(inode, None)

    def _sync(self, file: int) -> None:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            self.names = {path.name: path.stat().st_ino for path in self.directory.iterdir()}
        elif status.st_ino not in self.lost:
            self.contents[status.st_ino] = Path(f"/proc/self/fd/{file}").read_bytes()

    def images(self) -> list[Image]:
        """All that the disk may have now."""
        paths = list(self.directory.iterdir())
        now = {path.stat().st_ino: path.read_bytes() for path in paths}
        current = {path.name: path.stat().st_ino for path in paths}
        return [
            frozenset((name, contents.get(inode, b"")) for name, inode in names.items())
            for names in (current, self.names)
            for contents in ({**self.contents, **now}, self.contents)
        ]


def held(ledger: Ledger) -> Held:
    return frozenset(device for each in ledger.state.allocations.values() for device in each.device_ids)


def grant(ledger: Ledger, device: str) -> None:
    ledger.grant([Allocation(id=ledger.next_id(), devices={GPU: (DeviceID(device),)})])


def grant_together(ledger: Ledger, *devices: str) -> None:
    """As for callers of one moment."""
    with ledger.transaction():
        for device in devices:
            grant(ledger, device)


def release_oldest(ledger: Ledger) -> None:
    ledger.release([next(iter(ledger.state.allocations))], "released")


def publish(ledger: Ledger) -> None:
    while ledger.pending:
        ledger.published([ledger.pending[0][0]])


def test_a_power_cut_leaves_the_record_before_or_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut at any moment the record is as before the change or as after it."""
    directory = tmp_path / "watched"
    directory.mkdir()
    possible: dict[Image, set[Held]] = {}
    """What the disk may have -> what the record may then be."""
    with open_journal(directory, NODE) as journal, monkeypatch.context() as patch:
        disk = Disk(directory, patch)
        ledger = Ledger(NODE, journal, ManualClock(), compact_after=3)

        def expect(*records: Held) -> None:
            for image in disk.images():
                possible[image] = possible.get(image, {*records}) & {*records}

        def change(deed: Callable[[], None], after: Held) -> None:
            """The power may go while this is under way, and once it is done what it did must last."""
            before = held(ledger)
            disk.after_call = lambda: expect(before, after)
            deed()
            assert after == held(ledger)
            expect(after)

        def fail(deed: Callable[[], None], meant: Held) -> None:
            """The disk refuses it, and then it was not done."""
            before = held(ledger)
            with pytest.raises(StateFault):
                change(deed, meant)
            assert before == held(ledger)
            expect(before)

        expected: list[str] = []
        for number in range(9):
            expected.append(f"GPU-{number}")
            change(partial(grant, ledger, expected[-1]), frozenset(expected))
            if number % 3 == 2:
                del expected[0]
                change(partial(release_oldest, ledger), frozenset(expected))
            if number % 4 == 1:
                change(partial(publish, ledger), frozenset(expected))
            if number % 4 == 2:
                several = [f"GPU-{number}-{each}" for each in "abc"]
                expected += several
                change(partial(grant_together, ledger, *several), frozenset(expected))
            refused = partial(grant_together, ledger, "GPU-x", "GPU-y"), frozenset([*expected, "GPU-x", "GPU-y"])
            if number == 4:
                disk.failing = True
                fail(*refused)
            if number == 6:
                disk.room = 30
                fail(*refused)
                disk.room = 1 << 30

    for number, (image, acceptable) in enumerate(possible.items()):
        folder = tmp_path / str(number)
        folder.mkdir(mode=0o700)
        for name, content in image:
            (folder / name).write_bytes(content)
        with open_journal(folder, NODE) as journal:
            found = Ledger(NODE, journal, ManualClock())
            assert held(found) in acceptable
            assert None is found.unconfirmed


def test_of_a_group_that_was_cut_short_nothing_is_held(tmp_path: Path) -> None:
    """Wherever its line ends on the disk, a whole one without its line feed apart, which counts as damage."""
    with open_journal(tmp_path / "whole", NODE) as journal:
        ledger = Ledger(NODE, journal, ManualClock())
        grant(ledger, "GPU-0")
        before = len(journal.path.read_bytes())
        grant_together(ledger, "GPU-1", "GPU-2", "GPU-3")
        whole = journal.path.read_bytes()

    for size in (*range(before, len(whole) - 1), len(whole)):
        image = frozenset({("journal", whole[:size]), ("published", b"0 0\n")})
        with open_journal(put_back(image, tmp_path / str(size)), NODE) as journal:
            found = Ledger(NODE, journal, ManualClock())
            assert (4 if size == len(whole) else 1) == len(held(found))
            assert None is found.unconfirmed


def entry(number: int) -> JournalEntry:
    """One that can follow any with a lower number."""
    said = AllocationsSnapshot(node=NODE, epoch=number, seq=1, allocations=(), digest="")
    return JournalEntry(time=float(number), events=(said,))


def put_back(image: Image, folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    for name, content in image:
        (folder / name).write_bytes(content)
    return folder


def test_an_append_after_an_unsynced_rewrite_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    What is appended after a rewrite that was not synced is there after a power cut. The new journal is in place, but the
    disk may still have the old one under its name.
    """
    directory = tmp_path / "watched"
    with open_journal(directory, NODE) as journal, monkeypatch.context() as patch:
        disk = Disk(directory, patch)
        journal.load()
        for number in (1, 2):
            journal.append(entry(number))
        disk.failing_directory = True
        with pytest.raises(StateFault, match="Input/output error"):
            journal.rewrite([entry(2)])
        journal.append(entry(3))
        images = disk.images()

    for number, image in enumerate(images):
        with open_journal(put_back(image, tmp_path / str(number)), NODE) as found:
            assert [entry(2), entry(3)] == found.load()[-2:]


@pytest.mark.parametrize("keeps_size", [False, True], ids=["is cut", "is not cut"])
@pytest.mark.parametrize("fails", ["sync", "write"])
def test_an_append_after_a_failed_one_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, keeps_size: bool
) -> None:
    """The next append writes a new file: of the old one later syncs may succeed although the disk has lost its data."""
    directory = tmp_path / "watched"
    with open_journal(directory, NODE) as journal, monkeypatch.context() as patch:
        disk = Disk(directory, patch)
        journal.load()
        journal.append(entry(1))
        disk.keeps_size = keeps_size
        disk.failing = fails == "sync"
        disk.room = 10 if fails == "write" else disk.room
        with pytest.raises(StateFault):
            journal.append(entry(2))
        disk.room = 1 << 30
        journal.append(entry(3))
        images = disk.images()

    for number, image in enumerate(images):
        with open_journal(put_back(image, tmp_path / str(number)), NODE) as found:
            assert [entry(1), entry(3)] == found.load()
            assert None is found.unconfirmed


def test_a_damaged_journal_has_its_second_name_on_disk_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A damaged journal has its second name on disk before another file takes the first. A disk may do the two in either
    order: without a sync between them what was damaged could be gone.
    """
    with open_journal(tmp_path / "state", NODE) as journal:
        journal.load()
        journal.append(entry(1))
    file = tmp_path / "state" / "journal"
    file.write_bytes(file.read_bytes().replace(b"topoalign", b"t0poalign"))
    calls: list[str] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            directory = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            calls.append("fsync of the directory" if directory else name)
            return original(*args, **kwargs)

        return call

    with open_journal(tmp_path / "state", NODE) as journal, monkeypatch.context() as patch:
        for name in ("link", "fsync", "replace"):
            patch.setattr(os, name, noted(name, getattr(os, name)))
        journal.load()

    assert ["link", "fsync of the directory"] == calls[calls.index("link") :][:2]
    assert calls.index("replace") > calls.index("link") + 1
