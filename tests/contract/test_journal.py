"""What every journal promises, and what the one on disk promises beyond it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest
from simulation import journal as simulated

from topoalign.allocator.ledger.journal import FileJournal, open_journal
from topoalign.core.model.errors import InvalidField, StateFault
from topoalign.core.model.events import Allocation, AllocationsSnapshot
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName, ResourceName
from topoalign.core.ports import Journal, JournalEntry

NODE = NodeName("node-1")


def entry(number: int) -> JournalEntry:
    """One that can follow any with a lower number."""
    allocation = Allocation(
        id=AllocationID(f"a-{number}"), devices={ResourceName("nvidia.com/gpu"): (DeviceID(f"GPU-{number}"),)}
    )
    said = AllocationsSnapshot(node=NODE, epoch=number, seq=1, allocations=(allocation,), digest="")
    return JournalEntry(time=float(number), events=(said,))


class Shelf:
    """Opens the same journal again and again, as restarts do."""

    def __init__(self, directory: Path | None, *, simulation: bool = False) -> None:
        self.directory = directory
        self.disk = simulated.Disk()
        self.memory = self.disk.journal
        self._simulation = simulation

    @contextmanager
    def open(self) -> Iterator[Journal]:
        if self._simulation:
            yield simulated.FaultyJournal(self.disk, Random(0))
        elif self.directory is None:
            yield self.memory
        else:
            with open_journal(self.directory, NODE) as journal:
                yield journal


@pytest.fixture(params=["memory", "simulated", "file"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state" if request.param == "file" else None, simulation=request.param == "simulated")


def test_a_new_journal_is_empty(shelf: Shelf) -> None:
    with shelf.open() as journal:
        assert journal.load() == []
        assert journal.published() == (0, 0)


def test_what_was_appended_is_there_after_a_restart_in_the_same_order(shelf: Shelf) -> None:
    with shelf.open() as journal:
        journal.load()
        for number in (1, 2, 3):
            journal.append(entry(number))
        journal.mark_published(1, 2)

    with shelf.open() as journal:
        assert [entry(1), entry(2), entry(3)] == journal.load()
        assert journal.published() == (1, 2)


def test_a_rewrite_replaces_everything_and_appending_goes_on_behind_it(shelf: Shelf) -> None:
    with shelf.open() as journal:
        journal.load()
        journal.append(entry(1))
        journal.rewrite([entry(2)])
        journal.append(entry(3))

    with shelf.open() as journal:
        assert [entry(2), entry(3)] == journal.load()


def on_disk(directory: Path, *numbers: int) -> Path:
    with open_journal(directory, NODE) as journal:
        journal.load()
        for number in numbers:
            journal.append(entry(number))
    return directory / "journal"


def test_a_journal_cut_anywhere_in_its_last_line_loses_that_entry_only(tmp_path: Path) -> None:
    """An append that was cut short was never answered; every entry before it was, and is kept."""
    file = on_disk(tmp_path / "whole", 1, 2)
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        file.write_bytes(whole[:cut])
        with open_journal(tmp_path / "whole", NODE) as journal:
            assert [entry(1)] == journal.load()
            journal.append(entry(3))
        with open_journal(tmp_path / "whole", NODE) as journal:
            assert [entry(1), entry(3)] == journal.load()


@pytest.mark.parametrize("shelf", ["memory"], indirect=True)
def test_a_doubt_outlives_the_process_until_the_journal_is_trusted(shelf: Shelf, tmp_path: Path) -> None:
    on_disk(tmp_path, 1).write_bytes(b"")
    on_file = Shelf(tmp_path)
    shelf.memory.unconfirmed = "it was damaged"
    for each in (shelf, on_file):
        with each.open() as journal:
            journal.load()
            assert journal.unconfirmed is not None
        with each.open() as journal:
            journal.load()
            assert journal.unconfirmed is not None
            journal.append(entry(2))
            journal.trust()
        with each.open() as journal:
            assert [entry(2)] == journal.load()
            assert journal.unconfirmed is None


def test_a_second_process_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path, NODE),
        pytest.raises(StateFault, match=f"pid {os.getpid()}"),
        open_journal(tmp_path, NODE),
    ):
        pass


def test_a_full_disk_that_takes_no_pid_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever logs on that disk may have taken any room that was free a moment ago."""
    on_disk(tmp_path, 1)

    def full(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with open_journal(tmp_path, NODE) as journal:
        assert [entry(1)] == journal.load()


def test_a_pid_takes_the_place_of_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("41943040000\n")
    with open_journal(tmp_path, NODE), pytest.raises(StateFault) as refused, open_journal(tmp_path, NODE):
        pass

    assert refused.value.finding.endswith(f"pid {os.getpid()}")


def test_a_symbolic_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InvalidField) as refused, open_journal(tmp_path, NODE):
        pass
    assert "symbolic link" in refused.value.remedy
    assert not (tmp_path / "elsewhere").exists()


class FaultyJournal(FileJournal):
    """A journal on a disk that takes only part of the next line."""

    def append(self, entry: JournalEntry) -> None:
        limit = os.fstat(self.file).st_size + 10
        import resource
        import signal

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            super().append(entry)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)


def test_a_partial_append_is_not_in_the_journal_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    """The kernel itself cuts the write short: a limit on the file's size, which behaves like a full disk."""
    on_disk(tmp_path, 1)
    faulty = FaultyJournal(tmp_path, NODE)
    assert [entry(1)] == faulty.load()
    with pytest.raises(StateFault):
        faulty.append(entry(2))
    FileJournal.append(faulty, entry(3))
    faulty.close()

    with open_journal(tmp_path, NODE) as journal:
        assert [entry(1), entry(3)] == journal.load()


@pytest.mark.parametrize("becomes", ["deleted", "moved away", "an old copy"])
def test_a_journal_taken_away_in_use_is_written_again_with_all_it_had(tmp_path: Path, becomes: str) -> None:
    """The open file takes what is appended all the same, and nobody would find it there after a restart."""
    state = tmp_path / "state"
    with open_journal(state, NODE) as journal:
        journal.load()
        journal.append(entry(1))
        old = (state / "journal").read_bytes()
        journal.append(entry(2))
        if becomes == "moved away":
            (state / "journal").rename(tmp_path / "journal")
        else:
            (state / "journal").unlink()
        if becomes == "an old copy":
            (state / "journal").write_bytes(old)
        journal.append(entry(3))
    with open_journal(state, NODE) as journal:
        assert [entry(1), entry(2), entry(3)] == journal.load()
        assert journal.unconfirmed is None


def test_what_a_rewrite_left_out_stays_out_when_written_again(tmp_path: Path) -> None:
    """Facts that a rewrite left out do not come back when the journal is written again."""
    with open_journal(tmp_path, NODE) as journal:
        journal.load()
        journal.append(entry(1))
        journal.append(entry(2))
        journal.rewrite([entry(2)])
        (tmp_path / "journal").unlink()
        journal.append(entry(3))
    with open_journal(tmp_path, NODE) as journal:
        assert [entry(2), entry(3)] == journal.load()


def test_where_the_whole_directory_was_taken_away_nothing_is_recorded(tmp_path: Path) -> None:
    """Its lock went with it: another process may have the node."""
    with open_journal(tmp_path / "state", NODE) as journal:
        journal.load()
        journal.append(entry(1))
        (tmp_path / "state").rename(tmp_path / "elsewhere")
        with pytest.raises(StateFault, match="No such file"):
            journal.append(entry(2))


def test_a_mark_replaces_a_longer_one(tmp_path: Path) -> None:
    """It is written in the place of the one before."""
    with open_journal(tmp_path, NODE) as journal:
        journal.load()
        for mark in [(1_700_000_000_000, 99_999), (1_700_000_000_001, 1), (2, 3)]:
            journal.mark_published(*mark)

            assert mark == journal.published()


def test_an_unreadable_mark_means_that_the_published_place_is_unknown(tmp_path: Path) -> None:
    """If the mark cannot be read, it is unknown what was published."""
    on_disk(tmp_path, 1)
    (tmp_path / "published").write_text("not numbers")

    with open_journal(tmp_path, NODE) as journal:
        assert journal.published() is None


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "close"])
@pytest.mark.parametrize("nth", [1, 2])
def test_appends_after_any_failed_rewrite_call_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    """Above all where the new file is in place already: the old one, still open, must not be written any more."""
    on_disk(tmp_path, 1, 2)
    journal = FileJournal(tmp_path, NODE)
    journal.load()
    original, calls = getattr(os, call), count(1)

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls) == nth:
            raise OSError(errno.EIO, "Input/output error")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch, suppress(StateFault):
        patch.setattr(os, call, failing)
        journal.rewrite([entry(2)])
    journal.append(entry(3))
    journal.close()

    with open_journal(tmp_path, NODE) as again:
        assert [entry(2), entry(3)] == again.load()[-2:]


def no_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes no byte of a second file; of the journal itself it does."""
    write = os.write

    def full(file: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith("journal.new"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)


def test_where_there_is_no_room_for_a_second_journal_the_first_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(tmp_path, 1, 2)
    with open_journal(tmp_path, NODE) as journal:
        journal.load()
        no_room_for_another(monkeypatch)
        with pytest.raises(StateFault, match="No space left"):
            journal.rewrite([entry(2)])
        journal.append(entry(3))

    assert not (tmp_path / "journal.new").exists()
    with open_journal(tmp_path, NODE) as journal:
        assert [entry(1), entry(2), entry(3)] == journal.load()


def test_a_doubt_that_could_not_be_ended_on_disk_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(tmp_path, 1).write_bytes(b"")
    with open_journal(tmp_path, NODE) as journal:
        journal.load()
        no_room_for_another(monkeypatch)
        with pytest.raises(StateFault):
            journal.trust()

        assert journal.unconfirmed is not None
